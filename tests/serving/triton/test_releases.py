"""What is known of a tritonserver, by the version that it says it has."""

import pytest

from serving.triton.installation import TRITON_RELEASES, oldest_secure, triton_release


@pytest.mark.parametrize(
    ("version", "container"),
    [
        pytest.param("2.51.0", "24.10", id="known"),
        pytest.param("2.67.1", "24.10", id="between two"),
        pytest.param("2.68.0", "26.04", id="the other"),
        pytest.param("2.73.0dev", "26.04", id="newer than all"),
        pytest.param("3.0.0", "26.04", id="a new major version"),
        pytest.param("2.40.0", "24.10", id="older than all"),
    ],
)
def test_an_unknown_release_is_treated_as_the_newest_known_one_before_it(version: str, container: str) -> None:
    assert triton_release(version).container == container


def test_other_machines_may_reach_26_04_and_later() -> None:
    assert oldest_secure().container == "26.04"
    assert [release.is_secure for release in TRITON_RELEASES] == sorted(
        release.is_secure for release in TRITON_RELEASES
    )
