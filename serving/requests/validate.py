"""Validate the lengths and ids of requests, all requests of a group together. numpy only.

The cost of a numpy call is paid once for the group. Only if a request is invalid, the id policies of the tables are
applied to each request separately.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from serving.bundle.id_maps import ID_MAPS_FILE
from serving.errors import InternalError, InvalidRequest, Reason, ServingError
from serving.requests.id_maps import IdMaps
from serving.requests.id_policies import apply_id_policies
from serving.requests.layout import segment_bounds
from serving.requests.offsets import bag_offsets, concatenate
from serving.requests.position_weights import weights_by_position
from serving.requests.types import Ids, KjtRequest, Lengths, ValidatedRequests, Weights

_UINT64 = np.dtype(np.uint64)
_NO_SEGMENTS: Ids = np.empty(0, np.int64)
_NO_LENGTHS: Lengths = np.empty(0, np.int32)
_NO_REQUESTS = ValidatedRequests((), _NO_SEGMENTS, None, _NO_LENGTHS, *[np.zeros(1, np.int64)] * 3)
# The ufuncs behind `max` and `any`, which call them through Python functions.
_max_of_segments, _any = np.maximum.reduceat, np.logical_or.reduce


def validate_each(
    requests: Sequence[KjtRequest],
) -> tuple[ValidatedRequests, Sequence[int], dict[int, ServingError], dict[str, int]]:
    """Validate requests together. If one of them is invalid, apply the tables' id policies to each request.

    Returns:
        Four results: the valid requests, their positions in `requests`, the error of each invalid request by
        position, and by table the number of ids outside [0, rows) in the valid requests. The errors have no
        tracebacks, because tracebacks would keep arrays in memory.

    Raises:
        InternalError: as for `validate`.
    """
    try:
        validated: ValidatedRequests | None = validate(requests)
    except InvalidRequest:
        validated = None  # leave the handler, because errors raised in it would refer to this one
    if validated is not None:
        return validated, range(len(requests)), {}, {}
    changed: dict[int, KjtRequest] = {}
    errors: dict[int, ServingError] = {}
    ids_outside: dict[str, int] = {}
    for position, request in enumerate(requests):
        try:
            changed[position], counts = apply_id_policies(request)
        except InvalidRequest as error:
            errors[position] = error.with_traceback(None)
            continue
        for table, count in counts.items():
            ids_outside[table] = ids_outside.get(table, 0) + count
    return validate([*changed.values()]) if changed else _NO_REQUESTS, [*changed], errors, ids_outside


def validate(requests: Sequence[KjtRequest]) -> ValidatedRequests:
    """Validate the lengths and ids of all requests at once, before they reach FBGEMM.

    An id of a table with a map becomes a row, if the map accepts it. An id outside a table with the policy `modulo`
    becomes id mod rows. Position weights become per-id weights.

    Returns:
        The requests, concatenated. With R = 1, the arrays are the request's own unless ids change: nothing is copied.

    Raises:
        InvalidRequest: at least one request is invalid. `apply_id_policies` finds out which one, and why.
        InternalError: a map has a row that its table does not have, because its file was damaged.
    """
    values, lengths, rows = _concatenated(requests)
    offsets = bag_offsets(lengths)
    _expect_sums(requests, offsets)
    bags = segment_bounds(requests)
    ids = offsets[bags]
    if (id_maps := requests[0].feature_set.id_maps) is not None:
        values = _map_to_rows(requests, id_maps, values, ids)
    outside = _segments_outside(values, ids, rows)
    if outside.size:
        mapped = outside[concatenate([request.feature_set.maps for request in requests])[outside] >= 0]
        # An id that a map does not accept has the row -1.
        if any(int(values[ids[segment] : ids[segment + 1]].max()) >= int(rows[segment]) for segment in mapped):
            raise InternalError(f"{ID_MAPS_FILE}: expected rows of its tables, got others: publish the bundle again")
        if not concatenate([request.feature_set.modulo for request in requests])[outside].all():
            raise InvalidRequest("values: expected ids in [0, rows)", Reason.IDS)
        # The result is in [0, rows) for negative ids too. Ids in [0, rows) do not change.
        values = np.remainder(values, rows.astype(np.int64).repeat(np.diff(ids)))
    weights = _counted_weights(requests, ids)
    if (position_weights := requests[0].feature_set.position_weights) is not None:
        weights = weights_by_position(requests, position_weights, lengths, offsets, ids, weights)
    return ValidatedRequests(requests, values, weights, lengths, offsets, bags, ids)


def _concatenated(requests: Sequence[KjtRequest]) -> tuple[Ids, Lengths, npt.NDArray[np.uint64]]:
    """The ids of all requests, int64 [N], their lengths, int32 [bags], and the rows of their tables, uint64 [S]."""
    if len(requests) == 1:
        (request,) = requests
        return request.values, request.lengths, request.feature_set.rows
    return (
        concatenate([request.values for request in requests]),
        concatenate([request.lengths for request in requests]),
        concatenate([request.feature_set.rows for request in requests]),
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
    """The positions of the segments with an id outside [0, rows), int64. `rows`: of their tables, uint64 [S]."""
    # As unsigned numbers, negative ids are larger than any table.
    unsigned, starts = values.view(_UINT64), id_bounds[:-1]
    # For an empty segment, reduceat returns the id after it, and fails if there is no such id. Valid ids of a table
    # are mostly valid for the table before it, so it is cheaper to look for empty segments after a failure.
    if id_bounds.item(-2) < values.size and not _any(_max_of_segments(unsigned, starts) >= rows):
        return _NO_SEGMENTS
    filled = np.flatnonzero(starts < id_bounds[1:])
    return filled[_max_of_segments(unsigned, starts[filled]) >= rows[filled]]


def _map_to_rows(requests: Sequence[KjtRequest], id_maps: IdMaps, values: Ids, id_bounds: Ids) -> Ids:
    """The ids of all requests, int64 [N], as row numbers if their tables have maps."""
    maps = concatenate([request.feature_set.maps for request in requests]).repeat(np.diff(id_bounds))
    mapped = np.flatnonzero(maps >= 0)
    if mapped.size == values.size:
        return id_maps.rows_of(values, maps)
    rows = values.copy()
    rows[mapped] = id_maps.rows_of(values[mapped], maps[mapped])
    return rows


def _counted_weights(requests: Sequence[KjtRequest], id_bounds: Ids) -> Weights | None:
    """The weights of all requests, float32 [N]; 1 for the ids of tables that are not weighted."""
    if requests[0].weights is None:
        return None
    weights = np.concatenate([request.weights for request in requests if request.weights is not None])
    weighted = np.concatenate([request.feature_set.weighted for request in requests])
    if weighted.all():
        return weights
    return np.where(np.repeat(weighted, np.diff(id_bounds)), weights, np.float32(1))
