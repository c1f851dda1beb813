"""Find models that hang: that are alive, but do not go on, or are in an endless loop.

A canary is a lookup without samples. It asks for no scores, since these need dense inputs. A model hangs if it
answers neither the canary nor anybody else, and reads nothing from the disk. A model that is only busy goes on
answering others, or reading its tables, meanwhile.
"""

import threading
import time
from contextlib import suppress
from typing import Any

from serving.errors import ServingError
from serving.model.settings import ServingSettings, parsed
from serving.ranks.settings import hosts_of
from serving.request.tensors import LOOKED_UP
from serving.triton.control import Control

# A model that answered nobody for PERIOD_S is asked. It hangs if it answers nobody for _PATIENCE_S more. A router has
# longer, since a host that does not answer holds up the canary and the requests before it.
PERIOD_S, _PATIENCE_S = 5.0, 20.0


class Canary:
    """The canaries of one version of a model.

    Args:
        model: its name.
        version: its version.
        config: the ModelConfig that it is served with, as JSON.

    Attributes:
        overdue_s: the model hangs if it answered nobody for so long, in seconds.
        request: what is sent, in JSON.
    """

    def __init__(self, model: str, version: int, config: Any) -> None:
        self._model = model
        self._version = version
        self.overdue_s = PERIOD_S + _PATIENCE_S + 2 * _shard_timeout_s(config)
        self.request = {
            "inputs": [_empty(each) for each in config["input"] if not each.get("optional")],
            "outputs": [{"name": each["name"]} for each in config["output"] if each["name"] in LOOKED_UP],
        }
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
        return now - self._since > self.overdue_s

    def _ask(self, control: Control) -> None:
        """Send a canary. Its answer shows in the server's counts."""
        with suppress(ServingError):
            control.infer(self._model, self._version, self.request)


def _empty(tensor: Any) -> dict[str, Any]:
    return {
        "name": tensor["name"],
        "datatype": tensor["data_type"].removeprefix("TYPE_"),
        "shape": [1, 0],
        "data": [],
    }


def _shard_timeout_s(config: Any) -> float:
    """How long a router waits for a host, in seconds; 0 for other models."""
    parameters = {name: each.get("string_value", "") for name, each in config["parameters"].items()}
    settings = parsed(parameters)
    return hosts_of(ServingSettings(**settings)).timeout_s if settings.get("hosts") else 0.0
