"""The way of KeyedJaggedTensor (KJT) requests through one TBE call. numpy only: no Triton, no torch.

A KJT is feature-major: all bags of the first feature, then all bags of the second, and so on. Requests that wait
together take each step together, so that the cost of a numpy call is paid once for all of them::

    Tensors ─ accept ─► KjtRequest ─┐                                                   ┌─► [B_1, D_1]
    Tensors ─ accept ─► KjtRequest ─┼─ check ─► Checked ─ merge ─► Batch ─ TBE ─ split ─┼─► [B_2, D_2]
    Tensors ─ accept ─► KjtRequest ─┘     │                                             └─► [B_3, D_3]
                            ▲             │ some request is wrong
                            └─────────────┴─ apply_id_policies to each: it is changed, or refused

    accept              The tensors of one request have the right dtypes, shapes, sizes (`serving.requests.accept`).
    check               The lengths and ids of all requests are right. Raw ids become row numbers here, policy
                        `modulo` is applied, and position weights are made.
    apply_id_policies   Where check fails: what the tables' id policies say is done to one request.
    check_each          Both, in this order; then those requests that are not refused are checked again.
    merge               The requests become the batch that one TBE call answers.
    split               The answer to the batch becomes the answers to the requests.

Letters: R requests, S segments, F features, B samples, N ids, D columns of an answer; B_r is of request r. A segment
is a feature of a request.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from serving.bundle.id_maps import IDS
from serving.errors import IdsOutside, InternalError, InvalidRequest, Reason, ServingError
from serving.requests.id_maps import IdMaps
from serving.requests.offsets import (
    are_alike,
    bag_bounds,
    features_first,
    id_bounds,
    joined,
    offsets_of,
    place_of,
    ranges,
    segment_bounds,
)
from serving.requests.position_weights import expect_short_bags, positions_of, weights_by_position
from serving.requests.schema import FeatureSet, LookupSchema
from serving.requests.types import Batch, Embeddings, Ids, KjtRequest, Lengths, ValidatedRequests, Weights

_UINT64 = np.dtype(np.uint64)
_ANY = np.uint64(2**64 - 1)
_NO_SEGMENTS: Ids = np.empty(0, np.int64)
_NO_LENGTHS: Lengths = np.empty(0, np.int32)
_NOBODY = ValidatedRequests((), _NO_SEGMENTS, None, _NO_LENGTHS, *[np.zeros(1, np.int64)] * 3)
# `any` and `count_nonzero` call these by way of Python functions.
_max_of_each, _any = np.maximum.reduceat, np.logical_or.reduce


def check_each(
    requests: Sequence[KjtRequest],
) -> tuple[ValidatedRequests, Sequence[int], dict[int, ServingError], dict[str, int]]:
    """Check requests together. Where one of them is wrong, the tables' id policies are applied to each.

    Returns:
        Those that are right; their positions among all; why the others are not, by position; and how many ids of
        those that are right were outside [0, rows), by table. The errors hold no frames, which would hold arrays.

    Raises:
        InternalError: as `check`.
    """
    try:
        checked: ValidatedRequests | None = check(requests)
    except InvalidRequest:
        checked = None  # what follows is not part of this error's handling: errors hold those that they followed
    if checked is not None:
        return checked, range(len(requests)), {}, {}
    changed: dict[int, KjtRequest] = {}
    errors: dict[int, ServingError] = {}
    ids_outside: dict[str, int] = {}
    for position, request in enumerate(requests):
        applied = _policies_applied(request)
        if isinstance(applied, InvalidRequest):
            errors[position] = applied
            continue
        changed[position], counts = applied
        for table, count in counts.items():
            ids_outside[table] = ids_outside.get(table, 0) + count
    return check([*changed.values()]) if changed else _NOBODY, [*changed], errors, ids_outside


def _policies_applied(request: KjtRequest) -> tuple[KjtRequest, dict[str, int]] | InvalidRequest:
    try:
        return apply_id_policies(request)
    except InvalidRequest as error:
        return error.with_traceback(None)


def check(requests: Sequence[KjtRequest]) -> ValidatedRequests:
    """Check the lengths and ids of all requests at once. Nothing that fails here reaches FBGEMM.

    An id of a table with a map becomes the row that the map says, if it takes the id. An id outside a table
    whose policy is `modulo` becomes id mod rows.

    Returns:
        The requests, one behind the other. With R = 1 the arrays are the request's own: nothing is copied, unless
        ids change.

    Raises:
        InvalidRequest: at least one request is wrong. `apply_id_policies` tells which one, and why.
        InternalError: a map says another row than its table has: its file was damaged.
    """
    values, lengths, rows = _joined(requests)
    offsets = offsets_of(lengths)
    _expect_sums(requests, offsets)
    bags = segment_bounds(requests)
    ids = offsets[bags]
    if (id_maps := requests[0].feature_set.id_maps) is not None:
        values = _remapped(requests, id_maps, values, ids)
    outside = _segments_outside(values, ids, rows)
    if outside.size:
        mapped = outside[joined([request.feature_set.maps for request in requests])[outside] >= 0]
        # An id that a map does not take has no row, which is -1.
        if any(int(values[ids[at] : ids[at + 1]].max()) >= int(rows[at]) for at in mapped):
            raise InternalError(f"{IDS}: expected rows of its tables, got others: publish the bundle again")
        if not joined([request.feature_set.modulo for request in requests])[outside].all():
            raise InvalidRequest("values: expected ids in [0, rows)", Reason.IDS)
        # In [0, rows) for negative ids too. It changes no id that is there already.
        values = np.remainder(values, rows.astype(np.int64).repeat(np.diff(ids)))
    weights = _counted_weights(requests, ids)
    if (position_weights := requests[0].feature_set.position_weights) is not None:
        weights = weights_by_position(requests, position_weights, lengths, offsets, ids, weights)
    return ValidatedRequests(requests, values, weights, lengths, offsets, bags, ids)


def apply_id_policies(request: KjtRequest) -> tuple[KjtRequest, dict[str, int]]:
    """Do what the tables' id policies say to the ids of one request that are outside their tables.

    Policy `zero` leaves an id out of its bag, and in a sequence its row is zeros; `default_row` reads that row in its
    place; `error` refuses the request. For `modulo` no id is outside, and for a table with a map those that it does
    not take; `check` changes the others.

    Returns:
        A request that `check` takes, its arrays copied; and how many ids were outside, by table.

    Raises:
        InvalidRequest: a length is wrong; the message names the feature, what was expected and what came.
        IdsOutside: an id is outside a table whose policy is `error`; the message names it likewise.
    """
    feature_set = request.feature_set
    ids = np.diff(id_bounds(feature_set.names, request))  # of each feature, int64 [F]
    expect_short_bags(request)
    feature_of = np.repeat(np.arange(len(ids)), ids)  # of each id, int64 [N]
    bag_of = np.repeat(np.arange(request.lengths.size), request.lengths)  # of each id, int64 [N]
    outside = request.values.view(np.uint64) > np.repeat(_last_ids(feature_set), ids)
    counts = _counts_by_table(feature_set, feature_of[outside])
    refused = outside & ~(feature_set.zero | (feature_set.default_rows >= 0))[feature_of]
    if refused.any():
        at = int(np.argmax(refused))
        raise _ids_outside(request, at, int(bag_of[at]), counts)

    zeroed = outside & feature_set.zero[feature_of]
    rowless = zeroed & feature_set.sequence[feature_of]
    dropped = zeroed & ~rowless
    values = np.where(outside & ~dropped, np.maximum(feature_set.default_rows[feature_of], 0), request.values)
    lost = np.bincount(bag_of[dropped], minlength=request.lengths.size).astype(np.int32)
    changed = replace(
        request,
        values=values[~dropped],
        lengths=request.lengths - lost,
        weights=None if request.weights is None else request.weights[~dropped],
        positions=None if feature_set.position_weights is None else positions_of(request)[~dropped],
        rowless=rowless[~dropped] if rowless.any() else None,
    )
    return changed, counts


def merge(schema: LookupSchema, checked: ValidatedRequests) -> Batch:
    """Join requests so that one TBE call answers them all.

    KJT is feature-major, so this interleaves per feature; it is not a concatenation. Requests may ask for
    different features in different orders. The batch has every feature that some request asks for; a request
    that does not ask for it has empty bags there.

    Returns:
        values int64 [N], offsets int64 [F·B + 1], weights float32 [N] or None; B is the sum of all B_r. With R = 1
        they are the request's own arrays: nothing is copied.
    """
    requests = checked.requests
    feature_set = requests[0].feature_set
    if len(requests) == 1 and requests[0].shared is None:
        return Batch(requests, feature_set, checked.values, checked.offsets, checked.weights)
    if are_alike(requests):
        shape = len(requests), len(feature_set.names)
        order = features_first(*shape)
        lengths = checked.lengths.reshape(*shape, requests[0].samples).swapaxes(0, 1).ravel()
    else:
        if any(request.feature_set is not feature_set for request in requests):
            feature_set = schema.every.at(np.unique(joined([request.feature_set.positions for request in requests])))
        # The feature of each segment, as a position in the batch: int64 [S].
        positions = joined([feature_set.positions_of(request.feature_set) for request in requests])
        # Segments are in the order of requests. A stable sort puts them in the order of features.
        order = positions.argsort(kind="stable")
        heights = [request.height for request in requests]
        features = [len(request.feature_set.names) for request in requests]
        total = sum(heights)
        first_sample = np.repeat(np.array(list(accumulate(heights, initial=0))[:-1]), features)
        lengths = np.zeros(len(feature_set.names) * total, np.int32)
        bags = ranges(positions * total + first_sample, checked.bag_bounds[1:] - checked.bag_bounds[:-1])
        lengths[bags] = checked.lengths
    source = ranges(checked.id_bounds[:-1][order], (checked.id_bounds[1:] - checked.id_bounds[:-1])[order])
    weights = None if checked.weights is None else checked.weights.take(source)
    return Batch(requests, feature_set, checked.values.take(source), offsets_of(lengths), weights)


def split(embeddings: Embeddings, batch: Batch) -> list[Embeddings]:
    """Cut the answer to a batch into the answers to its requests.

    Args:
        embeddings: float32 or float16 [B, D].
        batch: what it answers.

    Returns:
        One array [B_r, D_r] for each request, of the same dtype. It is a view of `embeddings`, or a copy where the
        request's features or their order differ from the batch's.
    """
    merged = batch.feature_set
    answers: list[Embeddings] = []
    end = 0
    for request in batch.requests:
        start, end = end, end + request.height
        answer = embeddings[start:end]
        if request.feature_set is not merged:
            positions = merged.positions_of(request.feature_set)
            answer = answer.take(ranges((merged.ends - merged.dims)[positions], merged.dims[positions]), axis=1)
        answers.append(answer)
    return answers


def _joined(requests: Sequence[KjtRequest]) -> tuple[Ids, Lengths, npt.NDArray[np.uint64]]:
    """The ids of all requests, int64 [N], their lengths, int32 [bags], and the rows of their tables, uint64 [S]."""
    if len(requests) == 1:
        (request,) = requests
        return request.values, request.lengths, request.feature_set.rows
    return (
        joined([request.values for request in requests]),
        joined([request.lengths for request in requests]),
        joined([request.feature_set.rows for request in requests]),
    )


def _expect_sums(requests: Sequence[KjtRequest], offsets: Ids) -> None:
    """Refuse requests if the lengths of one do not add up to the number of its ids."""
    bags = ids = 0
    for request in requests:
        bags += request.lengths.size
        ids += request.values.size
        if offsets.item(bags) != ids:
            raise InvalidRequest("lengths: expected them to add up to the number of ids", Reason.LENGTHS)


def _segments_outside(values: Ids, id_bounds: Ids, rows: npt.NDArray[np.uint64]) -> Ids:
    """The segments with an id outside [0, rows): their positions, int64. `rows`: uint64 [S], of their tables."""
    # As an unsigned number, a negative id is larger than any table.
    unsigned, starts = values.view(_UINT64), id_bounds[:-1]
    # For an empty segment, reduceat gives the id behind it, and fails if there is none. Ids that are in all of their
    # tables are mostly in these, too: so it is cheaper to look for empty segments afterwards.
    if id_bounds.item(-2) < values.size and not _any(_max_of_each(unsigned, starts) >= rows):
        return _NO_SEGMENTS
    filled = np.flatnonzero(starts < id_bounds[1:])
    return filled[_max_of_each(unsigned, starts[filled]) >= rows[filled]]


def _remapped(requests: Sequence[KjtRequest], maps: IdMaps, values: Ids, id_bounds: Ids) -> Ids:
    """The ids of all requests, int64 [N], as row numbers where their tables have maps."""
    of_ids = joined([request.feature_set.maps for request in requests]).repeat(np.diff(id_bounds))
    here = np.flatnonzero(of_ids >= 0)
    if here.size == values.size:
        return maps.rows_of(values, of_ids)
    rows = values.copy()
    rows[here] = maps.rows_of(values[here], of_ids[here])
    return rows


def _counted_weights(requests: Sequence[KjtRequest], id_bounds: Ids) -> Weights | None:
    """The weights of all requests, float32 [N]; 1 for the ids of tables that take none."""
    if requests[0].weights is None:
        return None
    weights = np.concatenate([request.weights for request in requests if request.weights is not None])
    weighted = np.concatenate([request.feature_set.weighted for request in requests])
    if weighted.all():
        return weights
    return np.where(np.repeat(weighted, np.diff(id_bounds)), weights, np.float32(1))


def _last_ids(feature_set: FeatureSet) -> npt.NDArray[np.uint64]:
    """The last id that each feature takes, as a number without a sign: uint64 [F]. 2⁶⁴ − 1: it takes any int64."""
    last = np.where(feature_set.modulo, _ANY, feature_set.rows - np.uint64(1))
    if feature_set.id_maps is None:
        return last
    return np.where(feature_set.maps >= 0, feature_set.id_maps.last_ids[feature_set.maps], last)


def _counts_by_table(feature_set: FeatureSet, features: Ids) -> dict[str, int]:
    """How often each table occurs among those of `features`, positions int64 [n]; only tables that do."""
    counts: dict[str, int] = {}
    for table, count in zip(
        feature_set.tables, np.bincount(features, minlength=len(feature_set.tables)), strict=True
    ):
        if count:
            counts[table] = counts.get(table, 0) + int(count)
    return counts


def _ids_outside(request: KjtRequest, at: int, bag: int, counts: dict[str, int]) -> IdsOutside:
    """Name the id at position `at` of the values, which is in the bag at position `bag` of the lengths."""
    feature_set = request.feature_set
    feature, sample = place_of(bag, bag_bounds(len(feature_set.names), request.samples, request.shared))
    valid = 1 + _last_ids(feature_set).tolist()[feature]
    return IdsOutside(
        f"{feature_set.what} {feature_set.names[feature]!r}: expected an id in [0, {valid}), "
        f"got {request.values[at]} for sample {sample} (values[{at}])",
        counts,
    )
