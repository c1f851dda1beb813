"""Numbers of bytes, as people write them."""

import pytest

from export.sizes import bytes_per_s, size_bytes
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
def test_what_is_no_bandwidth_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"network: expected a bandwidth such as 10Gb/s or 1\.25GB/s, got"):
        bytes_per_s("network", text)


def test_no_bytes_are_a_size_where_that_has_a_meaning() -> None:
    assert size_bytes("router_memory", "0", least=0) == 0
    with pytest.raises(ConfigurationError, match="memory_per_rank: expected a size"):
        size_bytes("memory_per_rank", "0")
