"""The layout of a request: the number of bags of each feature, and the positions of its bags and ids.

A key has a bag for each sample, or one bag that all samples share. To rank N items for a user, the features of the
user are sent once, looked up once, and apply to each item. In KJT's terms, the batch size varies by feature.
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

# Most requests have one of a few numbers of samples, and a call answers at most 64 requests by default.
_CACHED_BOUNDS, _CACHED_ORDERS = 256, 64


def bag_bounds(features: int, samples: int, shared: Mask | None) -> Ids:
    """The start of each feature's bags in the lengths of a request, then the number of bags: int64 [features + 1].

    Args:
        features: F.
        samples: B.
        shared: the features with one bag, bool [F], or None. Other features have B bags.
    """
    if shared is None:
        return _even_bounds(features, samples)
    return bounds_of(np.where(shared, 1, samples))


@lru_cache(_CACHED_BOUNDS)
def _even_bounds(features: int, samples: int) -> Ids:
    """The bounds of bags if all features have the same number of bags. Do not write to them."""
    bounds: Ids = np.arange(features + 1) * samples
    bounds.flags.writeable = False
    return bounds


def shared_mask(keys: Sequence[str], dense: Sequence[str], shared: Collection[str]) -> Mask | None:
    """Which of the requested keys are shared: bool [keys], or None if none is.

    Args:
        keys: the requested keys, in order.
        dense: the names of the model's dense inputs.
        shared: the names of shared keys and dense inputs, which are not trusted.

    Raises:
        InvalidRequest: a name is neither a requested key nor a dense input, or is repeated.
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
    """The number of samples, B. If all keys are shared, it is the number of rows of the dense inputs.

    Args:
        tensors: the request, which is not trusted.
        keys: its requested keys, in order.
        shared: which of them are shared, bool [keys].
        by_id: the dense inputs that have a row for each id instead.

    Raises:
        InvalidRequest: the request has too many lengths, or too few.
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
    """The checked lengths of a request by key, [B] or [1] each.

    Args:
        tensors: the request.
        keys: its requested keys, in order.

    Raises:
        InvalidRequest: the request has too many lengths, or too few.
    """
    shared = np.array([key in tensors.shared for key in keys])
    bounds = bag_bounds(len(keys), samples_of(tensors, keys, shared), shared).tolist()
    lengths: Any = tensors.lengths  # int32: it was encoded
    return {key: lengths[first:last] for key, (first, last) in zip(keys, pairwise(bounds), strict=True)}


def lengths_by_id(
    outputs: Mapping[str, str], tensors: Tensors, keys: Sequence[str], by_id: Collection[str]
) -> dict[str, Lengths]:
    """The number of rows of each sample in outputs with a row for each id of a key, int32 [B] each.

    Args:
        outputs: the key of each such output.
        tensors: the request.
        keys: its keys, in order.
        by_id: as for `samples_of`.
    """
    if not outputs:
        return {}
    lengths = lengths_by_key(tensors, keys)
    samples = samples_of(tensors, keys, np.array([key in tensors.shared for key in keys]), by_id)
    repeats = {key: samples if key in tensors.shared else 1 for key in keys}
    return {name: np.tile(lengths[key], repeats[key]) for name, key in outputs.items()}


def are_alike(requests: Sequence[KjtRequest]) -> bool:
    """Whether all requests have the same features in one order, the same number of samples, and share no feature."""
    feature_set, samples = requests[0].feature_set, requests[0].samples
    return all(
        request.feature_set is feature_set and request.samples == samples and request.shared is None
        for request in requests
    )


@lru_cache(_CACHED_ORDERS)
def features_first(requests: int, features: int) -> Ids:
    """The segments of requests for the same features, in the order of features: int64 [S]. Do not write to them."""
    order = np.arange(requests * features).reshape(requests, features).T.ravel()
    order.flags.writeable = False
    return order


def segment_bounds(requests: Sequence[KjtRequest]) -> Ids:
    """The start of each segment's bags in the lengths of all requests, then the number of bags: int64 [S + 1]."""
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
    """The start of the ids of each of the n `names` in the values of a request, then N: int64 [n + 1].

    Raises:
        InvalidRequest: a length is negative, or the lengths do not add up to the number of ids.
    """
    bags = bag_bounds(len(names), request.samples, request.shared)
    bounds: Ids = bag_offsets(request.lengths)[bags]
    if bounds.item(-1) == request.values.size:
        return bounds
    negative = np.flatnonzero(request.lengths < 0)  # a negative length makes the sum wrong
    if negative.size:
        position, sample = feature_and_sample(int(negative[0]), bags)
        raise InvalidRequest(
            f"{request.feature_set.what} {names[position]!r}: expected lengths >= 0, got "
            f"{request.lengths[negative[0]]} for sample {sample}",
            Reason.LENGTHS,
        )
    raise _wrong_sum(request.feature_set.what, names, bounds, request.values.size)


def feature_and_sample(bag: int, bounds: Ids) -> tuple[int, int]:
    """The feature and the sample of a bag.

    Args:
        bag: the position of the bag in the lengths of a request.
        bounds: see `bag_bounds`.
    """
    feature = int(np.searchsorted(bounds, bag, side="right")) - 1
    return feature, bag - int(bounds[feature])


def _wrong_sum(what: str, names: Sequence[str], bounds: Ids, ids: int) -> InvalidRequest:
    """The error for a wrong sum of lengths, naming the feature (or `what` it is) whose bags run past the ids."""
    total = bounds[-1]
    feature = int(np.searchsorted(bounds[1:], ids, side="right")) if total > ids else len(names) - 1
    return InvalidRequest(
        f"{what} {names[feature]!r}: expected its bags to take ids "
        f"[{bounds[feature]}, {bounds[feature + 1]}) of `values`, got {ids} ids for lengths that sum to {total}",
        Reason.LENGTHS,
    )
