"""The layout of a request: how many bags each feature has, and where its bags and ids are.

A key has a bag for each sample, or one that is shared by all samples. In ranking, one user meets N items: the
features of the user are sent once, looked up once, and count for each item. In KJT's words: the batch size varies by
feature.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from serving.errors import InvalidRequest, Reason, quoted
from serving.requests.offsets import bag_offsets, bounds_of, concatenate
from serving.requests.schema import shortened
from serving.requests.types import Ids, KjtRequest, Lengths, Mask, Tensors

# Most requests have one of few numbers of samples, and a call answers at most 64 of them by default.
_CACHED_BOUNDS, _CACHED_ORDERS = 256, 64


def bag_bounds(features: int, samples: int, shared: Mask | None) -> Ids:
    """Where the bags of each feature start in the lengths of a request, then their number: int64 [features + 1].

    Args:
        features: F.
        samples: B.
        shared: which of them have one bag, bool [F]. The others have B. None: all have B.
    """
    if shared is None:
        return _even_bounds(features, samples)
    return bounds_of(np.where(shared, 1, samples))


@lru_cache(_CACHED_BOUNDS)
def _even_bounds(features: int, samples: int) -> Ids:
    """The bounds of bags where each feature has as many; not to be written to."""
    bounds: Ids = np.arange(features + 1) * samples
    bounds.flags.writeable = False
    return bounds


def shared_mask(keys: Sequence[str], dense: Sequence[str], shared: Collection[str]) -> Mask | None:
    """Which of the keys that are asked for come once: bool [keys]. None: no key does.

    Args:
        keys: what is asked for, in order.
        dense: names of the model's dense inputs.
        shared: what comes once. Anything may be in it.

    Raises:
        InvalidRequest: a name is neither a key that is asked for nor a dense input, or comes twice.
    """
    if not shared:
        return None
    for name in shared:
        if name not in keys and name not in dense:
            one_of = quoted((*keys, *dense))
            raise InvalidRequest(f"once: {shortened(name)!r}: expected one of {one_of}", Reason.FEATURES)
    if len(set(shared)) < len(shared):
        raise InvalidRequest(f"once: expected each name once, got {quoted(shared)}", Reason.FEATURES)
    mask = np.array([key in shared for key in keys])
    return mask if mask.any() else None


def samples_of(tensors: Tensors, keys: Sequence[str], shared: Mask | None, by_id: Collection[str] = ()) -> int:
    """The number of samples, B. Where all keys come once, dense inputs have a row for each sample.

    Args:
        tensors: the request. Anything may be in it.
        keys: what it asks for, in order.
        shared: which of them come once, bool [keys].
        by_id: the dense inputs that have a row for each id instead.

    Raises:
        InvalidRequest: there are too many lengths, or too few.
    """
    bags = tensors.lengths.size
    single = 0 if shared is None else int(np.count_nonzero(shared))
    unshared = len(keys) - single
    if not unshared and bags == single:
        without_samples = {*tensors.shared, *by_id}
        return next((len(rows) for name, rows in tensors.dense.items() if name not in without_samples), 1)
    samples, remainder = divmod(bags - single, unshared) if unshared else (0, 1)
    if samples < 0 or remainder:
        alone = f"{single} for the keys that come once, and " if single else ""
        raise InvalidRequest(
            f"lengths: expected {alone}a multiple of {unshared}, one length for each sample of each feature "
            f"({quoted(keys)}), got {bags}",
            Reason.LENGTHS,
        )
    return samples


def lengths_by_key(tensors: Tensors, keys: Sequence[str]) -> dict[str, Lengths]:
    """The lengths of a request by key, [B] or [1] each, and they are right.

    Args:
        tensors: the request.
        keys: what it asks for, in order.

    Raises:
        InvalidRequest: there are too many lengths, or too few.
    """
    shared = np.array([key in tensors.shared for key in keys])
    bounds = bag_bounds(len(keys), samples_of(tensors, keys, shared), shared).tolist()
    lengths: Any = tensors.lengths  # int32: it was encoded
    return {key: lengths[first:last] for key, (first, last) in zip(keys, pairwise(bounds), strict=True)}


def lengths_by_id(
    outputs: Mapping[str, str], tensors: Tensors, keys: Sequence[str], by_id: Collection[str]
) -> dict[str, Lengths]:
    """How many rows each sample has in outputs with a row for each id of a key, int32 [B] each.

    Args:
        outputs: the key of each such output.
        tensors: the request.
        keys: its keys, in order.
        by_id: as `samples_of`.
    """
    if not outputs:
        return {}
    lengths = lengths_by_key(tensors, keys)
    samples = samples_of(tensors, keys, np.array([key in tensors.shared for key in keys]), by_id)
    repeats = {key: samples if key in tensors.shared else 1 for key in keys}
    return {name: np.tile(lengths[key], repeats[key]) for name, key in outputs.items()}


def are_alike(requests: Sequence[KjtRequest]) -> bool:
    """Whether all ask for the same features in one order, for as many samples each, and nothing comes once."""
    feature_set, samples = requests[0].feature_set, requests[0].samples
    return all(
        request.feature_set is feature_set and request.samples == samples and request.shared is None
        for request in requests
    )


@lru_cache(_CACHED_ORDERS)
def features_first(requests: int, features: int) -> Ids:
    """The segments of requests for the same features, in the order of features: int64 [S]; not to be written to."""
    order = np.arange(requests * features).reshape(requests, features).T.ravel()
    order.flags.writeable = False
    return order


def segment_bounds(requests: Sequence[KjtRequest]) -> Ids:
    """Where the bags of each segment start in the lengths of all requests, then their number: int64 [S + 1]."""
    first = requests[0]
    if len(requests) == 1:
        return bag_bounds(len(first.feature_set.names), first.samples, first.shared)
    if are_alike(requests):
        return _even_bounds(len(requests) * len(first.feature_set.names), first.samples)
    features = [len(request.feature_set.names) for request in requests]
    bags = np.array([request.samples for request in requests]).repeat(features)
    if any(request.shared is not None for request in requests):
        come_once = [
            np.zeros(count, np.bool_) if request.shared is None else request.shared
            for request, count in zip(requests, features, strict=True)
        ]
        bags[concatenate(come_once)] = 1
    return bounds_of(bags)


def id_bounds(names: Sequence[str], request: KjtRequest) -> Ids:
    """Where the ids of each of the n `names` start in the values of a request, then N: int64 [n + 1].

    Raises:
        InvalidRequest: a length is negative, or the lengths do not add up to the number of ids.
    """
    bags = bag_bounds(len(names), request.samples, request.shared)
    bounds: Ids = bag_offsets(request.lengths)[bags]
    if bounds.item(-1) == request.values.size:
        return bounds
    negative = np.flatnonzero(request.lengths < 0)  # with one of them, lengths never add up
    if negative.size:
        position, sample = feature_and_sample(int(negative[0]), bags)
        raise InvalidRequest(
            f"{request.feature_set.what} {names[position]!r}: expected lengths >= 0, got "
            f"{request.lengths[negative[0]]} for sample {sample}",
            Reason.LENGTHS,
        )
    raise _wrong_sum(request.feature_set.what, names, bounds, request.values.size)


def feature_and_sample(bag: int, bounds: Ids) -> tuple[int, int]:
    """The feature that a bag is of, and its sample.

    Args:
        bag: its position in the lengths of a request.
        bounds: see `bag_bounds`.
    """
    feature = int(np.searchsorted(bounds, bag, side="right")) - 1
    return feature, bag - int(bounds[feature])


def _wrong_sum(what: str, names: Sequence[str], bounds: Ids, ids: int) -> InvalidRequest:
    """Name the feature, or `what` it is, whose bags run past the ids, or the last one where ids are left over."""
    total = bounds[-1]
    feature = int(np.searchsorted(bounds[1:], ids, side="right")) if total > ids else len(names) - 1
    return InvalidRequest(
        f"{what} {names[feature]!r}: expected its bags to take ids "
        f"[{bounds[feature]}, {bounds[feature + 1]}) of `values`, got {ids} ids for lengths that sum to {total}",
        Reason.LENGTHS,
    )
