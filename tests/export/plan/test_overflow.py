"""What TorchRec's planner found no place for is named, with the bytes that are missing."""

import pytest

from export.plan.torchrec_planner import overflow_of

_PIECES = [(30, "small"), (100, "large"), (70, "middle"), (70, "another")]


@pytest.mark.parametrize(("ranks", "memory_bytes"), [(1, 270), (2, 140), (3, 100), (4, 100)])
def test_pieces_that_fill_ranks_to_the_byte_are_placed(ranks: int, memory_bytes: int) -> None:
    """The largest first, each on the emptiest rank."""
    assert overflow_of(_PIECES, ranks, memory_bytes) is None


@pytest.mark.parametrize(
    ("ranks", "memory_bytes", "message"),
    [
        (1, 269, "table 'small': a shard of it takes 30 bytes, 1 more than any of 1 ranks has left of its 269"),
        (2, 139, "table 'another': a shard of it takes 70 bytes, 1 more than any of 2 ranks has left of its 139"),
        (4, 99, "table 'large': a shard of it takes 100 bytes, 1 more than any of 4 ranks has left of its 99"),
    ],
)
def test_a_piece_that_finds_no_room_is_named(ranks: int, memory_bytes: int, message: str) -> None:
    assert overflow_of(_PIECES, ranks, memory_bytes) == (
        f"{message}: all tables take 270 bytes: give more --memory-per-rank or --ranks, allow types that cut smaller, "
        "or store narrower dtypes"
    )
