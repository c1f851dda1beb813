"""A file over ranges reads as a file in memory does."""

import io

from hypothesis import given
from hypothesis import strategies as st

from serving.range_file import RangeFile

CONTENT = bytes(range(100))
SEEKS = st.tuples(st.integers(0, 150), st.just(0)) | st.tuples(st.integers(-100, 50), st.just(2))


@given(st.lists(st.tuples(SEEKS, st.integers(0, 120))))
def test_reads_are_those_of_a_file_in_memory(steps: list[tuple[tuple[int, int], int]]) -> None:
    file, oracle = RangeFile(len(CONTENT), lambda start, length: CONTENT[start : start + length]), io.BytesIO(CONTENT)
    for (offset, whence), size in steps:
        assert file.seek(offset, whence) == oracle.seek(offset, whence)
        assert file.read(size) == oracle.read(size)
        assert file.tell() == oracle.tell()


def test_no_range_is_read_at_the_end() -> None:
    ranges: list[tuple[int, int]] = []

    def read_range(start: int, length: int) -> bytes:
        ranges.append((start, length))
        return CONTENT[start : start + length]

    file = io.BufferedReader(RangeFile(len(CONTENT), read_range), 64)
    assert file.read() == CONTENT
    assert file.read() == b""
    assert all(0 < length <= len(CONTENT) - start for start, length in ranges)
