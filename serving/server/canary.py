"""Does a model answer? A canary is a lookup without samples, for nobody: who answers neither it nor others hangs.

A process that hangs without dying, paused or in an endless loop, is otherwise seen by its callers alone. One that is
only busy goes on answering others while the canary waits, or goes on reading tables from the disk.
"""

import threading
import time
from contextlib import suppress
from typing import Any

from serving.errors import ServingError
from serving.server.control import Control

# An idle model is asked this often, and has this long to answer somebody.
PERIOD_S, PATIENCE_S = 5.0, 20.0


class Canary:
    """The canaries of one version of a model.

    Args:
        model, version: of what.
        config: what it is served with.
    """

    def __init__(self, model: str, version: int, config: Any) -> None:
        self._model = model
        self._version = version
        self._request = {"inputs": [_empty(each) for each in config["input"]]}
        self._progress: object = None
        self._since = time.monotonic()
        self._thread: threading.Thread | None = None

    def is_overdue(self, progress: object, control: Control) -> bool:
        """Whether the model hangs. Asks it where it has answered nobody for a while.

        Args:
            progress: changes whenever it gets on, such as the number of requests that it has answered.
            control: takes the question; its deadline is the model's.
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
        """The answer is seen where all are: in the server's own counts."""
        with suppress(ServingError):
            control.infer(self._model, self._version, self._request)


def _empty(tensor: Any) -> dict[str, Any]:
    return {
        "name": tensor["name"],
        "datatype": tensor["data_type"].removeprefix("TYPE_"),
        "shape": [1, 0],
        "data": [],
    }
