"""Apply the id policies of tables to the ids of a request that are outside their tables."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from serving.errors import IdsOutside
from serving.requests.layout import bag_bounds, feature_and_sample, id_bounds
from serving.requests.position_weights import expect_short_bags, positions_of
from serving.requests.schema import FeatureSet
from serving.requests.types import Ids, KjtRequest

_ANY_ID = np.uint64(2**64 - 1)


def apply_id_policies(request: KjtRequest) -> tuple[KjtRequest, dict[str, int]]:
    """Apply the id policies of the tables to one request.

    Policy `zero` leaves an id out of its bag; in a sequence, its row is zeros. `default_row` replaces the id by that
    row. `error` refuses the request. Tables with policy `modulo` have no ids outside. For a table with a map, ids are
    outside if the map does not accept them. `serving.requests.validate` changes all other ids.

    Returns:
        A valid request with copied arrays, and the number of ids outside, by table.

    Raises:
        InvalidRequest: a length is wrong. The message names the feature, and what was expected.
        IdsOutside: an id is outside a table with the policy `error`. The message names the feature.
    """
    features = request.feature_set
    ids = np.diff(id_bounds(features.names, request))  # of each feature, int64 [F]
    expect_short_bags(request)
    feature_of = np.repeat(np.arange(len(ids)), ids)  # of each id, int64 [N]
    bag_of = np.repeat(np.arange(request.lengths.size), request.lengths)  # of each id, int64 [N]
    outside = request.values.view(np.uint64) > np.repeat(_last_ids(features), ids)
    counts = _counts_by_table(features, feature_of[outside])
    refused = outside & ~(features.zero | (features.default_rows >= 0))[feature_of]
    if refused.any():
        first_refused = int(np.argmax(refused))
        raise _ids_outside(request, first_refused, int(bag_of[first_refused]), counts)

    zeroed = outside & features.zero[feature_of]
    rowless = zeroed & features.sequence[feature_of]
    dropped = zeroed & ~rowless
    values = np.where(outside & ~dropped, np.maximum(features.default_rows[feature_of], 0), request.values)
    dropped_of_bags = np.bincount(bag_of[dropped], minlength=request.lengths.size).astype(np.int32)
    changed = replace(
        request,
        values=values[~dropped],
        lengths=request.lengths - dropped_of_bags,
        weights=None if request.weights is None else request.weights[~dropped],
        positions=None if features.position_weights is None else positions_of(request)[~dropped],
        rowless=rowless[~dropped] if rowless.any() else None,
    )
    return changed, counts


def _last_ids(features: FeatureSet) -> npt.NDArray[np.uint64]:
    """The last valid id of each feature as an unsigned number: uint64 [F]. 2⁶⁴ − 1: any int64 is valid."""
    last = np.where(features.modulo, _ANY_ID, features.rows - np.uint64(1))
    if features.id_maps is None:
        return last
    return np.where(features.maps >= 0, features.id_maps.last_ids[features.maps], last)


def _counts_by_table(features: FeatureSet, positions: Ids) -> dict[str, int]:
    """The number of times that each table occurs among the features at `positions`, int64 [n]."""
    counts: dict[str, int] = {}
    for table, count in zip(features.tables, np.bincount(positions, minlength=len(features.tables)), strict=True):
        if count:
            counts[table] = counts.get(table, 0) + int(count)
    return counts


def _ids_outside(request: KjtRequest, index: int, bag: int, counts: dict[str, int]) -> IdsOutside:
    """The error for the id at `index` of the values, in the bag at `bag` of the lengths."""
    features = request.feature_set
    feature, sample = feature_and_sample(bag, bag_bounds(len(features.names), request.samples, request.shared))
    valid_ids = 1 + _last_ids(features).tolist()[feature]
    return IdsOutside(
        f"{features.what} {features.names[feature]!r}: expected an id in [0, {valid_ids}), "
        f"got {request.values[index]} for sample {sample} (values[{index}])",
        counts,
    )
