"""Position weights: the n-th id of a bag, as it was sent, has the n-th weight of its feature.

They are assigned before the lookup, as in TorchRec's PositionWeightedModule. A bag with more ids than its feature has
weights is refused; the module raises an error.
"""

from collections.abc import Sequence

import numpy as np

from serving.errors import InvalidRequest, Reason
from serving.requests.layout import bag_bounds, feature_and_sample
from serving.requests.offsets import bag_offsets, concatenate
from serving.requests.types import Ids, KjtRequest, Lengths, Weights


def positions_in_bags(lengths: Lengths, offsets: Ids) -> Ids:
    """The position of each id in its bag: 0, 1, and so on.

    Args:
        lengths: bag sizes; int32 [n].
        offsets: their bounds; int64 [n + 1].

    Returns:
        int64 [sum of lengths].
    """
    positions: Ids = np.arange(offsets[-1])
    positions -= offsets[:-1].repeat(lengths)
    return positions


def positions_of(request: KjtRequest) -> Ids:
    """The position of each id in its bag of a request with checked lengths; int64 [N]."""
    if request.positions is not None:
        return request.positions
    return positions_in_bags(request.lengths, bag_offsets(request.lengths))


def weights_by_position(
    requests: Sequence[KjtRequest],
    position_weights: Weights,
    lengths: Lengths,
    offsets: Ids,
    id_bounds: Ids,
    weights: Weights | None,
) -> Weights:
    """The weights of the ids of all requests, of a model with position weights.

    Args:
        requests: the requests [R].
        position_weights: the position weights of all features of the model; float32 [n].
        lengths: the bag sizes of all requests; int32 [bags].
        offsets: the bounds of the bags; int64 [bags + 1].
        id_bounds: the bounds of the segments, each a feature of a request; int64 [S + 1].
        weights: the weights of other ids; float32 [N], or None for a weight of 1 each.

    Returns:
        float32 [N]: position weights for features that have them, or else `weights`.

    Raises:
        InvalidRequest: a bag is too long. `expect_short_bags` names it.
    """
    sizes = np.diff(id_bounds)
    if all(request.positions is None for request in requests):
        positions = positions_in_bags(lengths, offsets)
    else:
        positions = concatenate([positions_of(request) for request in requests])
    if (positions >= concatenate([request.feature_set.longest_bags for request in requests]).repeat(sizes)).any():
        raise InvalidRequest("lengths: expected bags as long as their position weights", Reason.LENGTHS)
    first = concatenate([request.feature_set.first_weights for request in requests]).repeat(sizes)
    by_position = first >= 0
    counted: Weights = np.ones(positions.size, np.float32) if weights is None else weights.copy()
    counted[by_position] = position_weights[(first + positions)[by_position]]
    return counted


def expect_short_bags(request: KjtRequest) -> None:
    """Refuse a request with a bag that has more ids than its feature has position weights.

    Raises:
        InvalidRequest: a bag is too long. The message names the feature and the sample.
    """
    feature_set = request.feature_set
    bags = bag_bounds(len(feature_set.names), request.samples, request.shared)
    too_long = request.lengths > feature_set.longest_bags.repeat(np.diff(bags))
    if too_long.any():
        bag = int(np.argmax(too_long))
        feature, sample = feature_and_sample(bag, bags)
        raise InvalidRequest(
            f"feature {feature_set.names[feature]!r}: expected at most {feature_set.longest_bags[feature]} ids in "
            f"a bag, one for each of its position weights, got {request.lengths[bag]} for sample {sample}",
            Reason.LENGTHS,
        )
