"""The user side once: keys and dense inputs that a request brings once, for all of its samples.

In ranking one user meets N items. What is the user's is then sent once, looked up once, and counts for each item. In
the words of KJT: the batch size varies by feature.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from serving.errors import InvalidRequest, Reason
from serving.request.bags import bag_bounds
from serving.request.schema import listed, shortened
from serving.request.tensors import EMBEDDINGS, ONCE, Embeddings, KjtRequest, Lengths, Mask, Outputs, Tensors


def once_of(keys: Sequence[str], dense: Sequence[str], once: Collection[str]) -> Mask | None:
    """Which of the keys that are asked for come once: bool [keys]. None: no key does.

    Args:
        keys: what is asked for, in order.
        dense: names of the model's dense inputs.
        once: what comes once. Anything may be in it.

    Raises:
        InvalidRequest: a name is neither a key that is asked for nor a dense input, or comes twice.
    """
    if not once:
        return None
    for name in once:
        if name not in keys and name not in dense:
            one_of = listed((*keys, *dense))
            raise InvalidRequest(f"once: {shortened(name)!r}: expected one of {one_of}", Reason.FEATURES)
    if len(set(once)) < len(once):
        raise InvalidRequest(f"once: expected each name once, got {listed([*once])}", Reason.FEATURES)
    found = np.array([key in once for key in keys])
    return found if found.any() else None


def samples_of(tensors: Tensors, keys: Sequence[str], once: Mask | None) -> int:
    """The number of samples, B. Where all keys come once, dense inputs have a row for each sample.

    Args:
        tensors: the request. Anything may be in it.
        keys: what it asks for, in order.
        once: which of them come once, bool [keys].

    Raises:
        InvalidRequest: there are too many lengths, or too few.
    """
    bags = tensors.lengths.size
    single = 0 if once is None else int(np.count_nonzero(once))
    each = len(keys) - single
    if not each and bags == single:
        return next((len(rows) for name, rows in tensors.dense.items() if name not in tensors.once), 1)
    samples, left_over = divmod(bags - single, each) if each else (0, 1)
    if samples < 0 or left_over:
        alone = f"{single} for the keys that come once, and " if single else ""
        raise InvalidRequest(
            f"lengths: expected {alone}a multiple of {each}, one length for each sample of each feature "
            f"({listed(keys)}), got {bags}",
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
    once = np.array([key in tensors.once for key in keys])
    bounds = bag_bounds(len(keys), samples_of(tensors, keys, once), once).tolist()
    lengths: Any = tensors.lengths  # int32: it was encoded
    return {key: lengths[first:last] for key, (first, last) in zip(keys, pairwise(bounds), strict=True)}


def spread(embeddings: Embeddings, request: KjtRequest) -> Embeddings:
    """What a request's scores are made of: the row of what comes once, in each sample.

    Args:
        embeddings: its part of the answer to a batch, [height, D]; written to.
        request: the request.

    Returns:
        [B, D].
    """
    if request.once is not None:
        ends = request.selection.ends
        for feature in np.flatnonzero(request.once).tolist():
            columns = slice(ends[feature] - request.selection.dims[feature], ends[feature])
            embeddings[1:, columns] = embeddings[0, columns]
    return embeddings[: request.samples]


def divided(embeddings: Embeddings, request: KjtRequest) -> Outputs:
    """The outputs of a request: `embeddings` [B, D_1] of features with a bag for each sample, and `once` [1, D_2] of
    those that come once. Each is there if it is asked for and there are such features.

    Args:
        embeddings: its part of the answer to a batch, [height, D_1 + D_2].
        request: the request.
    """
    if request.once is None:
        return {EMBEDDINGS: embeddings} if EMBEDDINGS in request.outputs else {}
    here = np.repeat(request.once, request.selection.dims)
    found = {}
    if EMBEDDINGS in request.outputs and not request.once.all():
        found[EMBEDDINGS] = embeddings[: request.samples, ~here]
    if ONCE in request.outputs and request.once.any():
        found[ONCE] = embeddings[:1, here]
    return found
