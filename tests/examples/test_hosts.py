"""The demo of hosts: what it says of memory limits is so."""

from pathlib import Path

import pytest

from examples.hosts import server
from examples.hosts.server import memory_limit


def test_an_ordinary_folder_is_no_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /sys/fs/cgroup is a tmpfs that holds the hierarchies of version 1."""
    monkeypatch.setattr(server, "_CGROUPS", ((str(tmp_path), "memory.max"),))
    with memory_limit("demo") as group:
        assert group is None
    assert list(tmp_path.iterdir()) == []
