"""Numbers of bytes, as people write them."""

import pytest

from export.values import MOST_BYTES, bytes_per_s, size_bytes
from serving.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10Gb/s", 1_250_000_000),
        ("10 Gb/s", 1_250_000_000),
        ("1.25GB/s", 1_250_000_000),
        ("100 mb/s", 12_500_000),
        ("8b/s", 1),
        ("3B/s", 3),
        ("1KiB/s", 1024),
        ("7", 7),
        (7, 7),
    ],
)
def test_a_bandwidth_is_read_with_its_unit(text: str | int, expected: int) -> None:
    assert bytes_per_s("network", text) == expected


@pytest.mark.parametrize("text", ["10Gbps", "10G", "10 Gb", "0", "-1B/s", "1b/s", "fast", "iB/s", "9e9", "1PB/s"])
def test_invalid_bandwidths_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"network: expected a bandwidth such as 10Gb/s or 1\.25GB/s, got"):
        bytes_per_s("network", text)


def test_a_size_of_0_is_accepted_only_where_it_is_allowed() -> None:
    assert size_bytes("router_memory", "0", least=0) == 0
    with pytest.raises(ConfigurationError, match="memory_per_rank: expected a size"):
        size_bytes("memory_per_rank", "0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        (1, 1),
        ("16GB", 16 * 10**9),
        ("16 gib", 16 << 30),
        ("1.5k", 1500),
        (" 2 MiB ", 2 << 20),
        (str(1 << 60), 1 << 60),
        (f"{1 << 20} TiB", 1 << 60),
        (str((1 << 60) - 1), (1 << 60) - 1),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert size_bytes("memory_per_rank", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(str(MOST_BYTES + 1), MOST_BYTES + 1, f"{MOST_BYTES}.0001", "1048577TiB", "1153000 TB", "0", "0.9", "-1"),
        *("1_0", "٣", "1e3", "nan", "inf", "1 parsec", "", "9" * 5000),
    ],
)
def test_invalid_and_excessive_sizes_are_refused(text: str | int) -> None:
    expected = f"memory_per_rank: expected a size such as 16GB or 16GiB, at most {1 << 60} bytes, got '"
    with pytest.raises(ConfigurationError, match=expected):
        size_bytes("memory_per_rank", text)
