"""Where batches are cut: every bag is in one piece, ids of a piece lie one behind the other, and parts are even."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.lookup.parallel_lookup import Piece, Sizes, cut

LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 100), st.just(0), st.just(5000))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Bag sizes by feature and sample, bytes of an id and of a bag by feature."""
    features, samples = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    lengths = draw(
        st.lists(st.lists(LENGTHS, min_size=samples, max_size=samples), min_size=features, max_size=features)
    )
    sizes = st.lists(st.integers(1, 300), min_size=features, max_size=features)
    return lengths, draw(sizes), draw(sizes)


def sizes_of(lengths: list[list[int]], of_id: list[int], of_bag: list[int]) -> Sizes:
    every = [0, *accumulate(length for column in lengths for length in column)]
    return Sizes(np.array(every), of_id, of_bag)


@given(batch=batches(), parts=st.integers(1, 6), slack=st.sampled_from([0, 0, 500, 10**9]))
def test_every_bag_is_in_one_piece_and_pieces_are_balanced(
    batch: tuple[list[list[int]], list[int], list[int]], parts: int, slack: int
) -> None:
    lengths, of_id, of_bag = batch
    samples = len(lengths[0])
    sizes = sizes_of(*batch)
    total = sizes.ends[-1]

    pieces = cut(sizes, [total / parts] * parts, slack)

    assert len(pieces) == parts
    bags = []
    for part in pieces:
        assert len(part) <= 3
        of_part = 0
        for piece in part:
            assert piece.feature < piece.last_feature
            assert piece.sample < piece.last_sample
            assert piece.last_feature - piece.feature == 1 or (piece.sample, piece.last_sample) == (0, samples)
            segments = [
                (feature, sample)
                for feature in range(piece.feature, piece.last_feature)
                for sample in range(piece.sample, piece.last_sample)
            ]
            bags += segments
            of_part += sum(lengths[f][s] * of_id[f] + of_bag[f] for f, s in segments)
        if slack == 0:
            most = max(length * of_id[f] + of_bag[f] for f, column in enumerate(lengths) for length in column)
            assert abs(of_part - total / parts) <= most + 1
    # All of them, once, in the order of their ids: so those of a piece lie one behind the other.
    assert bags == [(feature, sample) for feature in range(len(lengths)) for sample in range(samples)]


def test_a_cut_moves_between_features_where_that_saves_a_call() -> None:
    batch = ([[10, 10], [10, 10], [10, 10]], [1, 1, 1], [1, 1, 1])  # 22 bytes of each feature
    assert cut(sizes_of(*batch), [33, 33], 0) == [
        [Piece(0, 1, 0, 2), Piece(1, 2, 0, 1)],
        [Piece(1, 2, 1, 2), Piece(2, 3, 0, 2)],
    ]
    assert cut(sizes_of(*batch), [33, 33], 11) == [[Piece(0, 1, 0, 2)], [Piece(1, 3, 0, 2)]]
    assert cut(sizes_of(*batch), [40, 26], 6) == [[Piece(0, 2, 0, 2)], [Piece(2, 3, 0, 2)]]


@pytest.mark.parametrize("bag", [0, 3, 5])
def test_a_bag_with_nearly_all_ids_is_not_divided(bag: int) -> None:
    lengths = [[1, 1, 1], [1, 1, 1]]
    lengths[bag // 3][bag % 3] = 10**6
    parts = cut(sizes_of(lengths, [72, 72], [8, 8]), [36e6 + 200] * 2, 0)
    assert sum(piece.last_sample > piece.sample for part in parts for piece in part) >= 1
    large = [part for part in parts if any(_has(piece, bag // 3, bag % 3) for piece in part)]
    assert len(large) == 1


def _has(piece: Piece, feature: int, sample: int) -> bool:
    return piece.feature <= feature < piece.last_feature and piece.sample <= sample < piece.last_sample
