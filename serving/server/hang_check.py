"""Find models that hang: their process runs, but makes no progress.

An idle model gets a lookup without samples. It does not get a request for scores, because that needs dense inputs. A
model hangs if it answers neither this lookup nor any other request, and reads nothing from the disk. A busy model
answers other requests meanwhile, or reads its tables.
"""

import threading
import time
from contextlib import suppress
from typing import Any

from serving.bundle.tensor_names import LOOKED_UP
from serving.errors import ServingError
from serving.model.settings import ServingSettings, parsed
from serving.router.hosts_config import hosts_of
from serving.triton.control import Control

# A model that answered no request for PERIOD_S gets a lookup. It hangs if it answers nothing for another _PATIENCE_S.
# A router gets more time, because a silent host delays this lookup and the requests before it.
PERIOD_S, _PATIENCE_S = 5.0, 20.0


class HangCheck:
    """Tells whether one version of a model hangs.

    Args:
        model: its name.
        version: its version.
        config: the ModelConfig that it is served with, as JSON.

    Attributes:
        overdue_s: the model hangs if it makes no progress for this time, in seconds.
        request: the lookup without samples, as JSON.
    """

    def __init__(self, model: str, version: int, config: Any) -> None:
        self._model = model
        self._version = version
        self.overdue_s = PERIOD_S + _PATIENCE_S + 2 * _shard_timeout_s(config)
        self.request = {
            "inputs": [_empty(tensor) for tensor in config["input"] if not tensor.get("optional")],
            "outputs": [{"name": tensor["name"]} for tensor in config["output"] if tensor["name"] in LOOKED_UP],
        }
        self._progress: object = None
        self._since = time.monotonic()
        self._thread: threading.Thread | None = None

    def is_overdue(self, progress: object, control: Control) -> bool:
        """Whether the model hangs. Asks it if it made no progress for PERIOD_S.

        Args:
            progress: any value that changes when the model makes progress, such as the number of its answers.
            control: sends the lookup. The model has to answer within its timeout.
        """
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._since = progress, now
        is_asked = self._thread is not None and self._thread.is_alive()
        if not is_asked and now - self._since > PERIOD_S:
            self._thread = threading.Thread(target=self._ask, args=(control,), name="hang check", daemon=True)
            self._thread.start()
        return now - self._since > self.overdue_s

    def _ask(self, control: Control) -> None:
        """Ask, and ignore the answer. It shows in the server's counts."""
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
    """How long a router waits for a host, in seconds; 0 if the model is not a router."""
    parameters = {name: parameter.get("string_value", "") for name, parameter in config["parameters"].items()}
    settings = parsed(parameters)
    return hosts_of(ServingSettings(**settings)).timeout_s if settings.get("hosts") else 0.0
