"""KeyedJaggedTensor requests as arrays: accept, check, merge, split. numpy only: no Triton, no torch.

A KJT is feature-major: all bags of the first feature, then all bags of the second, and so on. Requests that wait
together are checked together and become one batch, so that what numpy costs is paid for once:

    accept  a request's tensors have the right dtypes, shapes and sizes
    check   lengths and ids of all requests at once: are all of them good?
    mend    one request, when not: say what is wrong with it, or do what its tables' id policies say
    merge   the batch that one TBE call answers
    split   its answer, by request
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import IdsOutside, InvalidRequest, Reason
from serving.schema import Schema, Selection, listed

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Embeddings = npt.NDArray[np.float32] | npt.NDArray[np.float16]
Array = npt.NDArray[np.generic]

_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much one request may ask for, how much is answered by one TBE call, and how long those that wait may take.

    A request is never refused for what it was merged with: requests that are too much together take several calls.

    Attributes:
        request_ids, request_samples: of one request; larger ones are refused.
        merged_requests, call_ids, call_samples: of one TBE call.
        waiting_requests: most that are handed over together.
        busy_ms: what waits together and is not answered within this is refused.
    """

    request_ids: int = 4 << 20
    request_samples: int = 64 << 10
    merged_requests: int = 64
    call_ids: int = 128 << 10
    call_samples: int = 16 << 10
    waiting_requests: int = 256
    busy_ms: int = 400


@dataclass(eq=False, slots=True)
class Tensors:
    """A request as it travels.

    Attributes:
        features: the features asked for, in the order of the answer; all of the model's where None.
        values: ids, feature-major; int64 [N] if the sender does it right, as all of these.
        lengths: bag sizes, feature-major; int32 [F·B].
        weights: a weight for each id; float32 [N], for weighted models and only for them.
        trace: the W3C `traceparent` that came with it.
    """

    features: Sequence[str] | None
    values: Array
    lengths: Array
    weights: Array | None = None
    trace: str | None = None


@dataclass(eq=False, slots=True)
class KjtRequest:
    """A request over F features and B samples; lengths and ids are as they came.

    Attributes:
        selection: the features, in the order of the answer.
        values: int64 ids, feature-major [N].
        lengths: int32 bag sizes, feature-major [F·B].
        weights: float32 [N], or None where the model takes none.
    """

    selection: Selection
    values: Ids
    lengths: Lengths
    weights: Weights | None
    samples: int


@dataclass(eq=False, slots=True)
class Checked:
    """R requests, one behind the other, whose lengths and ids are right. A segment is a feature of a request [S].

    Attributes:
        values, weights, lengths: those of the requests, concatenated.
        offsets: int64, where each bag starts in `values`; ends with N [bags + 1].
        bags: int64, where each segment's bags start in `lengths`; ends with their number [S + 1].
        ids: int64, where each segment's ids start in `values`; ends with N [S + 1].
    """

    requests: Sequence[KjtRequest]
    values: Ids
    weights: Weights | None
    lengths: Lengths
    offsets: Ids
    bags: Ids
    ids: Ids


@dataclass(eq=False, slots=True)
class Batch:
    """What one TBE call answers: requests side by side, sample after sample, feature-major.

    Attributes:
        selection: every feature that anyone asked for.
        offsets: int64, where each bag starts in `values`; ends with N [F·B + 1].
    """

    requests: Sequence[KjtRequest]
    selection: Selection
    values: Ids
    offsets: Ids
    weights: Weights | None


def accept(schema: Schema, tensors: Tensors, limits: Limits | None = None) -> KjtRequest:
    """Take the tensors of one request, if they are of the right kind and size.

    Nothing is copied, but for the ids of keys that several features read.

    Args:
        schema: what the model holds.
        tensors: the request.
        limits: how large it may be; no limit where None.

    Raises:
        InvalidRequest: naming the feature or tensor, what was expected and what came.
    """
    values, lengths, weights = tensors.values, tensors.lengths, tensors.weights
    selection = schema.select(tensors.features)
    _expect_vector("values", values, _INT64)
    _expect_vector("lengths", lengths, _INT32)
    samples, left_over = divmod(lengths.size, len(selection.keys))
    if left_over:
        raise InvalidRequest(
            f"lengths: expected a multiple of {len(selection.keys)}, one length for each sample of each feature "
            f"({listed(selection.keys)}), got {lengths.size}",
            Reason.LENGTHS,
        )
    if limits is not None:
        _expect_at_most("ids", values.size, limits.request_ids)
        _expect_at_most("samples", samples, limits.request_samples)
    if (weights is not None) != schema.weighted:
        expected = "one for each id, got none: this" if schema.weighted else "none, got some: this"
        kind = "weighted" if schema.weighted else "not weighted"
        raise InvalidRequest(f"weights: expected {expected} model is {kind}", Reason.WEIGHTS)
    if weights is not None:
        _expect_vector("weights", weights, _FLOAT32)
        if weights.size != values.size:
            raise InvalidRequest(
                f"weights: expected {values.size}, one for each id, got {weights.size}", Reason.WEIGHTS
            )
    request = KjtRequest(selection, values, lengths, weights, samples)  # type: ignore[arg-type]
    return request if selection.reads is None else _by_feature(request, selection.reads)


def grouped(requests: Sequence[KjtRequest], limits: Limits) -> Iterator[list[int]]:
    """Positions of requests, in order, in groups that one TBE call may answer; one too large for that is alone."""
    group: list[int] = []
    ids = samples = 0
    for position, request in enumerate(requests):
        ids += request.values.size
        samples += request.samples
        if group and (ids > limits.call_ids or samples > limits.call_samples):
            yield group
            group, ids, samples = [], request.values.size, request.samples
        group.append(position)
    if group:
        yield group


def check(requests: Sequence[KjtRequest]) -> Checked:
    """Check lengths and ids of all requests at once. Nothing that fails here reaches FBGEMM.

    Returns:
        The requests one behind the other; arrays are shared with the request where there is one.

    Raises:
        InvalidRequest: lengths or ids of at least one of them are not right; `mend` says which and what.
    """
    values = _joined([request.values for request in requests])
    lengths = _joined([request.lengths for request in requests])
    offsets = _offsets(lengths)
    # A bag's negative length counts as 2³¹ ids or more, so that it can never add up.
    ends = offsets[list(accumulate(request.lengths.size for request in requests))]
    if ends.tolist() != list(accumulate(request.values.size for request in requests)):
        raise InvalidRequest("lengths: expected them to add up to the number of ids", Reason.LENGTHS)

    rows = _joined([request.selection.rows for request in requests])
    bags = _bags(requests)
    ids = offsets[bags]
    starts = ids[:-1]
    filled = starts < ids[1:]  # reduceat would give an empty segment the id behind it
    # As unsigned: a negative id is huge.
    if (np.maximum.reduceat(values.view(np.uint64), starts[filled]) >= rows[filled]).any():
        raise InvalidRequest("values: expected ids in [0, rows)", Reason.IDS)
    return Checked(requests, values, _weights(requests, ids), lengths, offsets, bags, ids)


def mend(request: KjtRequest) -> tuple[KjtRequest, dict[str, int]]:
    """Do to one request what its tables' id policies say of ids outside [0, rows).

    Returns:
        A request that `check` takes, and how many ids were outside, by table.

    Raises:
        InvalidRequest: naming the feature, what was expected and what came.
        IdsOutside: the same, where ids are outside a table whose policy is `error`.
    """
    selection = request.selection
    ids = np.diff(_bounds(selection.names, request))
    outside = request.values.view(np.uint64) >= np.repeat(selection.rows, ids)
    feature_of = np.repeat(np.arange(len(ids)), ids)
    counted: dict[str, int] = {}
    for table, count in zip(selection.tables, np.bincount(feature_of[outside], minlength=len(ids)), strict=True):
        if count:
            counted[table] = counted.get(table, 0) + int(count)
    bag_of = np.repeat(np.arange(request.lengths.size), request.lengths)
    refused = outside & ~(selection.zero | (selection.default_rows >= 0))[feature_of]
    if refused.any():
        at = int(np.argmax(refused))
        row, sample = divmod(int(bag_of[at]), request.samples)
        raise IdsOutside(
            f"feature {selection.names[row]!r}: expected an id in [0, {selection.rows[row]}), "
            f"got {request.values[at]} for sample {sample} (values[{at}])",
            counted,
        )
    dropped = outside & selection.zero[feature_of]
    values = np.where(outside & ~dropped, selection.default_rows[feature_of], request.values)
    lost = np.bincount(bag_of[dropped], minlength=request.lengths.size).astype(np.int32)
    mended = replace(
        request,
        values=values[~dropped],
        lengths=request.lengths - lost,
        weights=None if request.weights is None else request.weights[~dropped],
    )
    return mended, counted


def merge(schema: Schema, checked: Checked) -> Batch:
    """Join requests so that one TBE call answers them all.

    KJT is feature-major, so this interleaves per feature; it is not a concatenation. Requests may ask for
    different features in different orders: the batch has each feature that anyone asked for, and empty bags
    where a request did not ask. With one request it is that request: nothing is copied.
    """
    requests = checked.requests
    selection = requests[0].selection
    if len(requests) == 1:
        return Batch(requests, selection, checked.values, checked.offsets, checked.weights)
    if any(request.selection is not selection for request in requests):
        selection = schema.every.at(np.unique(_joined([request.selection.positions for request in requests])))
    samples = [request.samples for request in requests]
    total = sum(samples)

    # The row of each segment in the batch. Segments are by request; a stable sort puts them by feature.
    rows = _joined([selection.rows_of(request.selection) for request in requests])
    order = rows.argsort(kind="stable")
    source = _ranges(checked.ids[:-1][order], (checked.ids[1:] - checked.ids[:-1])[order])

    features = [len(request.selection.names) for request in requests]
    first_sample = np.repeat(np.array(list(accumulate(samples, initial=0))[:-1]), features)
    lengths = np.zeros(len(selection.names) * total, np.int32)
    lengths[_ranges(rows * total + first_sample, checked.bags[1:] - checked.bags[:-1])] = checked.lengths
    weights = None if checked.weights is None else checked.weights.take(source)
    return Batch(requests, selection, checked.values.take(source), _offsets(lengths), weights)


def split(embeddings: Embeddings, batch: Batch) -> list[Embeddings]:
    """Cut the answer to a batch, [B, D], into those of its requests.

    Returns:
        One array [B_r, D_r] for each request: a view of `embeddings`, or a copy where the request's features
        or their order differ from the batch's.
    """
    merged = batch.selection
    answers: list[Embeddings] = []
    end = 0
    for request in batch.requests:
        start, end = end, end + request.samples
        answer = embeddings[start:end]
        if request.selection is not merged:
            rows = merged.rows_of(request.selection)
            answer = answer.take(_ranges((merged.ends - merged.dims)[rows], merged.dims[rows]), axis=1)
        answers.append(answer)
    return answers


def _by_feature(request: KjtRequest, reads: npt.NDArray[np.int64]) -> KjtRequest:
    """A request by key as one by feature: each feature gets the bags and ids of the key that it reads.

    Raises:
        InvalidRequest: the lengths are not right, so that it cannot be told whose ids are whose.
    """
    bounds = _bounds(request.selection.keys, request)
    ids = _ranges(bounds[reads], np.diff(bounds)[reads])
    return replace(
        request,
        values=request.values[ids],
        lengths=request.lengths.reshape(-1, request.samples)[reads].ravel(),
        weights=None if request.weights is None else request.weights[ids],
    )


def _bounds(names: Sequence[str], request: KjtRequest) -> Ids:
    """Where the ids of each of `names` start in the values of a request; ends with N.

    Raises:
        InvalidRequest: a length is negative, or they do not add up to the number of ids.
    """
    bags = request.lengths.reshape(len(names), -1)
    if bags.size and bags.min() < 0:
        row, sample = np.argwhere(bags < 0)[0]
        raise InvalidRequest(
            f"feature {names[row]!r}: expected lengths >= 0, got {bags[row, sample]} for sample {sample}",
            Reason.LENGTHS,
        )
    bounds: Ids = _offsets(request.lengths)[np.arange(len(bags) + 1) * request.samples]
    if bounds[-1] != request.values.size:
        _refuse_sum(names, bounds, request.values.size)
    return bounds


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array behind the other; the array itself where there is one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _offsets(lengths: Lengths) -> Ids:
    """Where each bag starts, and N behind them. Negative lengths count as the huge numbers they are unsigned."""
    offsets = np.empty(lengths.size + 1, np.int64)
    offsets[0] = 0
    lengths.view(np.uint32).cumsum(out=offsets[1:])
    return offsets


def _bags(requests: Sequence[KjtRequest]) -> Ids:
    """Where the bags of each segment start in the lengths of all requests; ends with their number [S + 1]."""
    if len(requests) == 1:
        return requests[0].selection.index * requests[0].samples
    sizes = np.repeat([request.samples for request in requests], [len(r.selection.names) for r in requests])
    bags = np.empty(sizes.size + 1, np.int64)
    bags[0] = 0
    sizes.cumsum(out=bags[1:])
    return bags


def _ranges(starts: Ids, sizes: Ids) -> Ids:
    """The ranges [start, start + size), one behind the other."""
    ends = sizes.cumsum()
    ranges: Ids = (starts - ends + sizes).repeat(sizes)
    ranges += np.arange(ranges.size)
    return ranges


def _weights(requests: Sequence[KjtRequest], ids: Ids) -> Weights | None:
    """The weights of all requests; 1 for the ids of tables that take none."""
    if requests[0].weights is None:
        return None
    weights = np.concatenate([request.weights for request in requests if request.weights is not None])
    counted = np.concatenate([request.selection.weighted for request in requests])
    if counted.all():
        return weights
    return np.where(np.repeat(counted, np.diff(ids)), weights, np.float32(1))


def _expect_vector(name: str, array: Array, dtype: np.dtype[Any]) -> None:
    if array.dtype is not dtype and array.dtype != dtype:
        raise InvalidRequest(f"{name}: expected dtype {dtype}, got {array.dtype}", Reason.SHAPE)
    if array.ndim != 1:
        raise InvalidRequest(f"{name}: expected 1 dimension, got shape {list(array.shape)}", Reason.SHAPE)


def _expect_at_most(what: str, found: int, limit: int) -> None:
    if found > limit:
        raise InvalidRequest(
            f"{what}: expected at most {limit} in a request, got {found}: send several requests, or have the "
            f"server's limit raised (`tbe-serve configure --max-request-{what}`)",
            Reason.SIZE,
        )


def _refuse_sum(names: Sequence[str], bounds: Ids, found: int) -> None:
    """Name the feature whose bags run past the ids, or the last one where ids are left over."""
    total = bounds[-1]
    row = int(np.searchsorted(bounds[1:], found, side="right")) if total > found else len(names) - 1
    raise InvalidRequest(
        f"feature {names[row]!r}: expected its bags to take ids "
        f"[{bounds[row]}, {bounds[row + 1]}) of `values`, got {found} ids for lengths that sum to {total}",
        Reason.LENGTHS,
    )
