"""The log of `tbe-serve run`: all that happens, whoever says it, as objects of JSON."""

import json
import signal
import threading
from pathlib import Path

import pytest

from serving.client import LookupClient
from serving.errors import InvalidRequest
from tests.serving.server.test_releases import wait_until
from tests.serving.server.test_versions import export_version
from tests.support.servers import running, stubs, tbe_serve, wait_for_answer

# Of each event of this test that has a model: its level, and who says it.
EVENTS = {
    "refused": ("WARNING", "model"),
    "switched": ("INFO", "tbe-serve"),
    "model_died": ("ERROR", "tbe-serve"),
    "model_recovered": ("INFO", "tbe-serve"),
}


def test_all_that_happens_is_a_line_of_json(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    for version in (1, 2):
        export_version(repository, version)
    with running(repository, "--log-format", "json") as server:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(server.process.stderr or ()), daemon=True)
        reader.start()
        with LookupClient(server.grpc, "m", 60) as client:
            for _ in range(50):
                with pytest.raises(InvalidRequest, match="feature 'x'"):
                    client.lookup({"x": [[-1]]})
            assert tbe_serve("load", "m", "--version", "1", "--url", server.grpc).stdout == "m: version 2 → 1\n"
            wait_until(lambda: len(stubs(server.triton, "m")) == 1)  # version 2 has ended
            stubs(server.triton, "m")[0].kill()
            wait_until(lambda: any("model_recovered" in line for line in lines))
            wait_for_answer(client)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        reader.join(60)
    events = [json.loads(line) for line in lines]
    for entry in events:
        assert {"time", "level", "source", "event", "message"} <= entry.keys()
        assert "\x1b" not in entry["message"]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    for event, expected in EVENTS.items():
        of_event = [entry for entry in events if entry["event"] == event]
        assert {(entry["level"], entry["source"]) for entry in of_event} == {expected}, event
        assert {entry["model"] for entry in of_event} == {"m"}
    (switched,) = [event for event in events if event["event"] == "switched"]
    assert (switched["version"], switched["message"]) == (1, "model 'm': serves version 1, before 2")
    assert {event["version"] for event in events if event["event"] in ("model_died", "model_recovered")} == {1}
    refused = [event for event in events if event["event"] == "refused"]
    assert refused[0]["version"] == 2
    assert refused[0]["message"].startswith("feature 'x': ")
    assert len(refused) < 20  # of 50: at most one in ten seconds
    order = [
        event["event"] for event in events if event["event"] in ("ready", "model_died", "model_recovered", "stopping")
    ]
    assert order == ["ready", "model_died", "model_recovered", "stopping"]
