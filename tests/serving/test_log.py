"""What a server logs: each event as text and as JSON, whoever said it."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import log as module
from serving.errors import ConfigurationError
from serving.log import LogFormat, LogOnce, Sampled, about_model, close_log, server_log, triton_record

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
AT = "I1125 22:16:03.123456 4711 "


def logged(path: Path, say: Callable[[logging.Logger], object], form: LogFormat, host: int | None = None) -> str:
    log = server_log(path, form, host)
    say(log)
    close_log(log)
    return path.read_text()


def say(log: logging.Logger) -> None:
    log.warning("model %r: \x1b[31mred\n\u2028of it", "m", extra={"event": "switched", "model": "m", "version": 2})


def test_an_event_is_one_line_of_text(tmp_path: Path) -> None:
    line = logged(tmp_path / "log", say, LogFormat.TEXT)
    assert re.fullmatch(rf"{TIME} WARNING tbe-serve switched: model 'm': \[31mred of it\n", line), line
    of_host = logged(tmp_path / "log", say, LogFormat.TEXT, host=3)
    assert "WARNING tbe-serve switched: host 3: model 'm'" in of_host
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_an_event_is_one_object_of_json(tmp_path: Path) -> None:
    line = logged(tmp_path / "log", say, LogFormat.JSON, host=0)
    assert len(line.splitlines()) == 1
    report = json.loads(line)
    assert re.fullmatch(TIME, report.pop("time"))
    assert report == {
        "level": "WARNING",
        "source": "tbe-serve",
        "event": "switched",
        "host": 0,
        "model": "m",
        "version": 2,
        "message": "model 'm': \x1b[31mred\n\u2028of it",
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f'{AT}server.cc:630] "loaded"', ("INFO", "triton", "server.cc:630", "loaded")),
        (f"W{AT[1:]}a b.cc:1] plain", ("WARNING", "triton", "a b.cc:1", "plain")),
        (f'E{AT[1:]}x.cc:9] "two\\nlines \\"quoted\\""', ("ERROR", "triton", "x.cc:9", 'two\nlines "quoted"')),
        (f'F{AT[1:]}x.cc:9] "not \\q escaped"', ("CRITICAL", "triton", "x.cc:9", '"not \\q escaped"')),
        ("Traceback (most recent call last):", ("INFO", "triton", "printed", "Traceback (most recent call last):")),
        ("\x1b[1;33mWARN\x1b[0m not\x1b[m supported", ("INFO", "triton", "printed", "WARN not supported")),
        (f'E{AT[1:]}s.cc:241] "CudaDriverHelper, none"', ("INFO", "triton", "s.cc:241", "CudaDriverHelper, none")),
        ("", ("INFO", "triton", "printed", "")),
        ("100 % of %s", ("INFO", "triton", "printed", "100 % of %s")),
    ],
)
def test_a_line_of_triton_is_an_event(line: str, expected: tuple[str, ...]) -> None:
    record: Any = triton_record(line)
    assert (record.levelname, record.name, record.event, record.getMessage()) == expected


def test_lines_of_a_model_name_it() -> None:
    said: list[str] = []
    about_model(said.append, "refused", "a model/of 2", "17")("feature 'x':\nid 9/3] is outside")
    record: Any = triton_record(f"W{AT[1:]}log.py:1] {json.dumps(said[0])}")
    assert (record.name, record.levelname, record.event) == ("model", "WARNING", "refused")
    assert (record.model, record.version) == ("a model/of 2", 17)
    assert record.getMessage() == "feature 'x':\nid 9/3] is outside"


def test_frequent_events_are_logged_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr("serving.log.time.monotonic", lambda: now[0])
    sampled = Sampled(said.append)
    for number in range(1000):
        now[0] = 100 + number * 0.02  # 20 s in all
        sampled(f"{number} {'x' * 5000}")
    assert [line[:40] for line in said] == [
        f"0 {'x' * 38}",
        f"500 since the last line, such as: 500 {'x' * 2}",
    ]
    assert max(map(len, said)) < 1100
    several = list[str]()
    sampled = Sampled(several.append)
    for _ in range(3):
        sampled("busy", 256)
        now[0] += 6
    assert several == ["256 at once, such as: busy", "512 since the last line, such as: busy"]


def test_an_unwritable_log_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"absent/x\.log: expected a file that a log can be written to: No such"
    ):
        server_log(tmp_path / "absent" / "x.log")


def test_an_event_after_the_log_was_closed_is_dropped(tmp_path: Path) -> None:
    log = server_log(tmp_path / "log")
    close_log(log)
    log.error("lost")
    assert (tmp_path / "log").read_text() == ""


def test_the_page_lists_exactly_the_events() -> None:
    root = Path(module.__file__).parent
    code = "".join(path.read_text() for path in root.rglob("*.py"))
    ways = (
        r'"event": "(\w+)"',
        r'"event": "\w+" if \S+ else "(\w+)"',
        r'warns\("(\w+)"\)',
        r'event="(\w+)"',
        r'log_error, "(\w+)"',
        r'logging\.[A-Z]+, "([a-z_]+)"',
    )
    events = {event for way in ways for event in re.findall(way, code)}
    page = (root.parent / "docs" / "logs.md").read_text().partition("| event | level |")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    assert {match for row in rows for match in re.findall(r"\w+", row)} == events


def test_a_changed_or_solved_problem_is_logged_again() -> None:
    lines: list[str] = []
    log = LogOnce(lines.append, "known before")
    for problem in ("known before", "a", "a", "b", None, "b"):
        log(problem)
        assert log.problem == problem
    assert lines == ["a", "b", "b"]
