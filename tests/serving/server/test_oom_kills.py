"""Whether the kernel ended processes for want of memory."""

from pathlib import Path

import pytest

from serving.server.oom_kills import OomKills


def test_what_the_kernel_ended_is_said_once(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 10\noom_kill 3\nzone 1\n")
    kills = OomKills(counts)
    assert kills.since() == ""
    counts.write_text("pgfault 10\noom_kill 4\nzone 1\n")
    assert "the kernel ended a process of this machine for want of memory" in kills.since()
    assert kills.since() == ""


@pytest.mark.parametrize("content", [None, "pgfault 10\n"], ids=["no file", "an old kernel"])
def test_a_kernel_that_does_not_count_says_nothing(content: str | None, tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    if content is not None:
        counts.write_text(content)
    assert OomKills(counts).since() == ""
