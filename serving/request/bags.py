"""Where the bags and the ids of each feature lie in a request."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from serving.errors import InvalidRequest, Reason
from serving.request.jagged import bounds_of, joined, offsets_of
from serving.request.tensors import Ids, KjtRequest, Mask

# Most requests have one of few numbers of samples. Bounds are kept for so many.
_KEPT_BOUNDS = 256


def bag_bounds(features: int, samples: int, once: Mask | None) -> Ids:
    """Where the bags of each feature start in the lengths of a request, then their number: int64 [features + 1].

    Args:
        features: F.
        samples: B.
        once: which of them have one bag, bool [F]. The others have B. None: all have B.
    """
    if once is None:
        return _even_bounds(features, samples)
    return bounds_of(np.where(once, 1, samples))


@lru_cache(_KEPT_BOUNDS)
def _even_bounds(features: int, samples: int) -> Ids:
    """The bounds of bags where each feature has as many; not to be written to."""
    bounds: Ids = np.arange(features + 1) * samples
    bounds.flags.writeable = False
    return bounds


def segment_bounds(requests: Sequence[KjtRequest]) -> Ids:
    """Where the bags of each segment start in the lengths of all requests, then their number: int64 [S + 1]."""
    first = requests[0]
    if len(requests) == 1:
        return bag_bounds(len(first.selection.names), first.samples, first.once)
    features = [len(each.selection.names) for each in requests]
    bags = np.array([each.samples for each in requests]).repeat(features)
    if any(each.once is not None for each in requests):
        come_once = [
            np.zeros(count, np.bool_) if each.once is None else each.once
            for each, count in zip(requests, features, strict=True)
        ]
        bags[joined(come_once)] = 1
    return bounds_of(bags)


def id_bounds(names: Sequence[str], request: KjtRequest) -> Ids:
    """Where the ids of each of the n `names` start in the values of a request, then N: int64 [n + 1].

    Raises:
        InvalidRequest: a length is negative, or the lengths do not add up to the number of ids.
    """
    bags = bag_bounds(len(names), request.samples, request.once)
    if request.lengths.size and request.lengths.min() < 0:
        at = int(np.argmax(request.lengths < 0))
        position, sample = place_of(at, bags)
        raise InvalidRequest(
            f"{request.selection.what} {names[position]!r}: expected lengths >= 0, got {request.lengths[at]} for "
            f"sample {sample}",
            Reason.LENGTHS,
        )
    bounds: Ids = offsets_of(request.lengths)[bags]
    if bounds[-1] != request.values.size:
        raise _wrong_sum(request.selection.what, names, bounds, request.values.size)
    return bounds


def place_of(bag: int, bounds: Ids) -> tuple[int, int]:
    """The feature that a bag is of, and its sample.

    Args:
        bag: its position in the lengths of a request.
        bounds: see `bag_bounds`.
    """
    feature = int(np.searchsorted(bounds, bag, side="right")) - 1
    return feature, bag - int(bounds[feature])


def _wrong_sum(what: str, names: Sequence[str], bounds: Ids, found: int) -> InvalidRequest:
    """Name the feature, or `what` it is, whose bags run past the ids, or the last one where ids are left over."""
    total = bounds[-1]
    at = int(np.searchsorted(bounds[1:], found, side="right")) if total > found else len(names) - 1
    return InvalidRequest(
        f"{what} {names[at]!r}: expected its bags to take ids "
        f"[{bounds[at]}, {bounds[at + 1]}) of `values`, got {found} ids for lengths that sum to {total}",
        Reason.LENGTHS,
    )
