"""Cut a large request into requests of fewer samples, and join their answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from serving.requests.answers import JaggedRows
from serving.requests.layout import samples_of
from serving.requests.offsets import bag_offsets, bounds_of, concatenate
from serving.requests.types import Ids, Tensors

# With the default settings of a server, a request of this size takes one TBE call.
_MAX_SAMPLES, _MAX_IDS = 4096, 128 << 10
# Ids of pooled features that an engine looks up at once: 16 MiB.
_MAX_POOLED_IDS = 2 << 20
# Maximum bytes of the rows that the ids of a chunk read, and of the embeddings in its answer, as FP32.
_MAX_ROW_BYTES = 64 << 20


class ChunkLimits(NamedTuple):
    """The limits of a chunk, which has at least one sample, whatever its number of ids."""

    max_samples: int = _MAX_SAMPLES
    max_ids: int = _MAX_IDS


def chunk_limits(dims: Sequence[int], max_samples: int = _MAX_SAMPLES, max_ids: int = _MAX_IDS) -> ChunkLimits:
    """The limits of chunks for a model: lower than the default if the model or its server requires it.

    Args:
        dims: the columns of each feature in an answer.
        max_samples: the maximum samples of a request.
        max_ids: the maximum ids of a request.
    """
    floats = _MAX_ROW_BYTES // np.dtype(np.float32).itemsize
    return ChunkLimits(
        max(1, min(_MAX_SAMPLES, max_samples, floats // sum(dims))),
        max(1, min(_MAX_IDS, max_ids, floats // max(dims))),
    )


def engine_chunk_limits(dims: Sequence[int], *, has_sequences: bool) -> ChunkLimits:
    """The limits of chunks for an engine, which limits ids only for features with a row for each id.

    Args:
        dims: the columns of each feature in an answer.
        has_sequences: whether a feature's answer has a row for each id.
    """
    limits = chunk_limits(dims)
    return limits if has_sequences else limits._replace(max_ids=_MAX_POOLED_IDS)


def cut(tensors: Tensors, limits: ChunkLimits, by_id: Mapping[str, str]) -> Iterator[Tensors]:
    """Cut a request into chunks of consecutive samples. A request within the limits is yielded as it is.

    Args:
        tensors: a request made by `encode`, without shared features.
        limits: the limits of a chunk.
        by_id: the dense inputs with a row for each id, and the key of each.

    Raises:
        InvalidRequest: the request has too many lengths, or too few.
    """
    keys = tuple(tensors.features or ())
    samples = samples_of(tensors, keys, None)
    offsets = bag_offsets(tensors.lengths)  # type: ignore[arg-type]  # int32: it was encoded
    is_within = samples <= limits.max_samples and tensors.values.size <= limits.max_ids
    if is_within or offsets[-1] != tensors.values.size:  # lengths with a wrong sum are refused later
        yield tensors
        return
    bounds = np.stack([offsets[key * samples : (key + 1) * samples + 1] for key in range(len(keys))])
    ids = bounds_of(np.diff(bounds).sum(axis=0))
    first = 0
    while first < samples:
        last = int(np.searchsorted(ids, ids[first] + limits.max_ids, side="right")) - 1
        last = max(first + 1, min(last, first + limits.max_samples, samples))
        yield _chunk(tensors, keys, bounds, slice(first, last), by_id)
        first = last


def _chunk(tensors: Tensors, keys: Sequence[str], bounds: Ids, samples: slice, by_id: Mapping[str, str]) -> Tensors:
    """Some samples of a request.

    Args:
        tensors: the request.
        keys: its keys [F].
        bounds: the start of each sample's ids in its values, by key; int64 [F, B + 1].
        samples: the samples.
        by_id: as for `cut`.
    """
    ids = [slice(key_bounds[samples.start], key_bounds[samples.stop]) for key_bounds in bounds]
    of_key = {
        key: slice(key_ids.start - key_bounds[0], key_ids.stop - key_bounds[0])
        for key, key_ids, key_bounds in zip(keys, ids, bounds, strict=True)
    }
    return replace(
        tensors,
        values=concatenate([tensors.values[key_ids] for key_ids in ids]),
        lengths=tensors.lengths.reshape(len(keys), -1)[:, samples].reshape(-1),
        weights=None if tensors.weights is None else concatenate([tensors.weights[key_ids] for key_ids in ids]),
        dense={name: rows[of_key[by_id[name]] if name in by_id else samples] for name, rows in tensors.dense.items()},
    )


def joined(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer to a request from the answers to its chunks, in order: arrays [B, …] and `JaggedRows` by name."""
    return {name: _joined([answer[name] for answer in answers]) for name in answers[0]}


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], JaggedRows):
        return JaggedRows(
            concatenate([rows.values for rows in values]), concatenate([rows.lengths for rows in values])
        )
    return concatenate(values)
