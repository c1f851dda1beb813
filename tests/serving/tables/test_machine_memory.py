"""How much memory a machine has."""

from pathlib import Path

import pytest

from serving.tables.memory_budget import memory_of


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        pytest.param("", {}, 1000, id="no control group"),
        pytest.param("0::/\n", {"memory.max": "400\n"}, 400, id="a container's"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "300\n"}, 300, id="a parent's"),
        pytest.param("0::/a\n", {"a/memory.max": "5000\n", "b/memory.max": "1\n"}, 1000, id="above the machine's"),
        pytest.param(
            "4:cpu,memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": "9223372036854771712", "memory/memory.limit_in_bytes": "200"},
            200,
            id="version 1",
        ),
        pytest.param("4:cpu:/a\n", {"cpu/a/memory.limit_in_bytes": "7"}, 1000, id="another controller's"),
    ],
)
def test_a_machine_has_what_its_control_groups_allow(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
    assert memory_of(1000, tmp_path / "groups", tmp_path) == expected
