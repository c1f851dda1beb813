"""Whether the kernel ended processes for want of memory."""

import time
from pathlib import Path

import pytest

from serving.server.oom_kills import OomKills


def test_what_the_kernel_ended_just_now_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 10\noom_kill 3\nzone 1\n")
    kills = OomKills(counts)
    assert kills.said() == ""
    counts.write_text("pgfault 10\noom_kill 4\nzone 1\n")
    assert "the kernel ended a process of this machine for want of memory" in kills.said()
    assert kills.said() != ""  # another process may be missed for the same reason
    now += 60
    assert kills.said() == ""


def test_what_was_ended_long_ago_is_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counts = tmp_path / "vmstat"
    counts.write_text("oom_kill 3\n")
    kills = OomKills(counts)
    counts.write_text("oom_kill 9\n")
    kills.look()
    now += 60
    assert kills.said() == ""


@pytest.mark.parametrize("content", [None, "pgfault 10\n"], ids=["no file", "an old kernel"])
def test_a_kernel_that_does_not_count_says_nothing(content: str | None, tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    if content is not None:
        counts.write_text(content)
    assert OomKills(counts).said() == ""
