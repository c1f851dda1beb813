"""Find models that hang: that are alive, but paused or in an endless loop.

A canary is a lookup without samples. A model hangs if it answers neither the canary nor anybody else, and reads
nothing from the disk. A model that is only busy goes on answering others, or reading its tables, meanwhile.
"""

import threading
import time
from contextlib import suppress
from typing import Any

from serving.errors import ServingError
from serving.triton.control import Control

# A model that answered nobody for PERIOD_S is asked. It hangs if it answers nobody for PATIENCE_S more.
PERIOD_S, PATIENCE_S = 5.0, 20.0


class Canary:
    """The canaries of one version of a model.

    Args:
        model: its name.
        version: its version.
        config: the ModelConfig that it is served with, as JSON.
    """

    def __init__(self, model: str, version: int, config: Any) -> None:
        self._model = model
        self._version = version
        self._request = {"inputs": [_empty(each) for each in config["input"]]}
        self._progress: object = None
        self._since = time.monotonic()
        self._thread: threading.Thread | None = None

    def is_overdue(self, progress: object, control: Control) -> bool:
        """Whether the model hangs. Sends a canary if it made no progress for PERIOD_S.

        Args:
            progress: any value that changes when the model makes progress, such as the number of its answers.
            control: sends the canary; its timeout is the time that the model has to answer.
        """
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._since = progress, now
        is_asked = self._thread is not None and self._thread.is_alive()
        if not is_asked and now - self._since > PERIOD_S:
            self._thread = threading.Thread(target=self._ask, args=(control,), name="canary", daemon=True)
            self._thread.start()
        return now - self._since > PERIOD_S + PATIENCE_S

    def _ask(self, control: Control) -> None:
        """Send a canary. Its answer shows in the server's counts."""
        with suppress(ServingError):
            control.infer(self._model, self._version, self._request)


def _empty(tensor: Any) -> dict[str, Any]:
    return {
        "name": tensor["name"],
        "datatype": tensor["data_type"].removeprefix("TYPE_"),
        "shape": [1, 0],
        "data": [],
    }
