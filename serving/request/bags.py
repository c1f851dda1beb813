"""Where the bags and the ids of each feature lie in a request."""

from collections.abc import Sequence

import numpy as np

from serving.errors import InvalidRequest, Reason
from serving.request.jagged import bounds_of, offsets_of
from serving.request.tensors import Ids, KjtRequest, Mask


def bag_bounds(features: int, samples: int, once: Mask | None) -> Ids:
    """Where the bags of each feature start in the lengths of a request, then their number: int64 [features + 1].

    Args:
        features: F.
        samples: B.
        once: which of them have one bag, bool [F]. The others have B. None: all have B.
    """
    return bounds_of(bags_of(features, samples, once))


def bags_of(features: int, samples: int, once: Mask | None) -> Ids:
    """The number of bags of each feature, int64 [features]; arguments as `bag_bounds`."""
    bags: Ids = np.full(features, samples)
    if once is not None:
        bags[once] = 1
    return bags


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
