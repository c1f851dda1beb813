"""What a server is remembered to serve."""

from typing import Any, cast

import pytest

from serving.server.running_server import Served
from serving.triton.control import Control, VersionState


class Config:
    """A control API that knows one config."""

    def config(self, model: str) -> Any:
        return {"name": model}


def state(version: int, state: str = "READY", reason: str = "") -> VersionState:
    return VersionState("m", version, state, reason)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ((state(1), state(2)), (1, 2)),
        ((state(1), state(2, "UNAVAILABLE", "its process died")), (1, 2)),
        ((state(1), state(2, "UNAVAILABLE", "unloaded")), (1,)),
        ((state(1), state(2, "UNLOADING")), (1,)),
        ((state(1), state(2), state(3, "LOADING")), (1, 2)),
        ((state(1), state(2), state(3, "UNAVAILABLE", "weights.0.bin: expected")), (1, 2)),
        ((state(1, "UNAVAILABLE", "died"), state(2, "UNAVAILABLE", "died")), (1, 2)),
        ((state(1, "UNAVAILABLE", "unloaded"), state(2, "UNAVAILABLE", "unloaded")), None),
    ],
    ids=["all serve", "died", "unloaded", "unloading", "loading", "failed", "all died", "all unloaded"],
)
def test_crashed_versions_stay_remembered_and_unloaded_ones_do_not(
    index: tuple[VersionState, ...], expected: tuple[int, ...] | None
) -> None:
    served, control = Served(0.0), cast(Control, Config())
    served.update((state(1), state(2)), control)
    served.update(index, control)
    assert served.versions.get("m") == expected
