"""No test lets a default deadline decide: how much happens within it, others on the machine have a say in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from unittest import mock

from serving.client import connection
from serving.client.clients import _Client
from serving.client.connection import Connection
from serving.errors import ServingError
from serving.model.config_file import CONFIG, read_config, settings_of
from serving.router import hosts_config
from serving.router.hosts_config import HostsConfig

# For calls that have to succeed, in seconds. No test waits for it.
PATIENT_S = 60.0
# The commands of `tbe-serve` with a deadline of a second or a few, if nobody says another.
CALLING = ("bench", "health", "lookup", "score", "status")


class Default(float):
    """A default deadline. It can be looked at, but whoever waits until then is a test that does not say how long."""

    def __radd__(self, _: float) -> NoReturn:
        raise AssertionError("a test lets a default deadline decide: say how long, such as PATIENT_S")


@contextmanager
def no_default_deadlines() -> Iterator[None]:
    """Inside the block, a call of this process fails that has no deadline but the default one."""
    of_client, of_hosts = Default(connection.DEFAULT_TIMEOUT_S), Default(hosts_config.DEFAULT_TIMEOUT_S)
    with (
        mock.patch.object(_Client.__init__, "__defaults__", (of_client,)),
        mock.patch.dict(Connection.__init__.__kwdefaults__ or {}, timeout_s=of_client),
        mock.patch.dict(HostsConfig.__init__.__kwdefaults__ or {}, timeout_s=of_hosts),
        mock.patch("serving.router.hosts_config.DEFAULT_TIMEOUT_S", of_hosts),
    ):
        yield


def check_routers(repository: Path) -> None:
    """Refuse to serve a router that has the default deadline for its hosts."""
    for path in repository.glob(f"*/{CONFIG}"):
        try:
            settings = settings_of(read_config(path.parent))
        except ServingError:  # the test is about that
            continue
        if settings.hosts and settings.shard_timeout_ms is None:
            raise AssertionError(f"{path}: a test lets a default deadline decide: say how long, --shard-timeout-ms")
