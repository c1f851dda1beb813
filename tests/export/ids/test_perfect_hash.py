"""A perfect hash finds every id that it was made of, with its row, and no other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.ids.id_maps import perfect_hash
from serving.bundle.id_maps import Numbers, buckets_of, entries_of, hashes_of

INT64 = st.integers(-(2**63), 2**63 - 1)


def rows_of(ids: Numbers, rows: Numbers, queried: Numbers) -> list[int]:
    """The row of each id that is asked for; -1 where there is none."""
    built = perfect_hash(ids, rows)
    hashes = hashes_of(queried)
    seeds = built.seeds[buckets_of(hashes, np.array([built.seeds.size], np.uint64))]
    entries = built.entries[entries_of(hashes, seeds, np.array([len(built.entries)], np.uint64))]
    return np.where(entries[:, 0] == queried, entries[:, 1], -1).tolist()  # type: ignore[no-any-return]


@given(ids=st.lists(INT64, unique=True, max_size=300), absent_ids=st.lists(INT64, max_size=20))
def test_exactly_the_known_ids_are_found(ids: list[int], absent_ids: list[int]) -> None:
    rows = {id_: number for number, id_ in enumerate(ids)}
    queried = [*ids, *absent_ids, 0, -1, 2**63 - 1]
    answer = rows_of(np.array(ids, np.int64), np.arange(len(ids)), np.array(queried, np.int64))
    assert answer == [rows.get(id_, -1) for id_ in queried]


@pytest.mark.parametrize("step", [1, 2**32, 3**20, 2**44])
def test_evenly_spaced_ids_are_found(step: int) -> None:
    ids = np.arange(-50_000, 50_000) * step
    rows = np.random.default_rng(0).permutation(ids.size)
    assert rows_of(ids, rows, ids) == rows.tolist()
    assert max(rows_of(ids, rows, ids + 1 if step > 1 else ids + 10**6)) == -1


def test_the_map_is_deterministic() -> None:
    ids, rows = np.arange(1000) ** 5, np.arange(1000)
    one, two = perfect_hash(ids, rows), perfect_hash(ids, rows)
    np.testing.assert_array_equal(one.seeds, two.seeds)
    np.testing.assert_array_equal(one.entries, two.entries)
