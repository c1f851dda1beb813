"""Supervise several tritonservers as one: a router's, and those of its hosts."""

import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from serving.server.watch.supervisor import Supervisor

_PERIOD_S = 0.25


class FleetSupervisor:
    """Each server is watched, and started anew, on a thread of its own. The main thread hears signals meanwhile.

    Args:
        hosts: of the servers of the hosts.
        router: of the router's server.
    """

    def __init__(self, hosts: Sequence[Supervisor], router: Supervisor) -> None:
        self._hosts, self._router = hosts, router
        self._number: int | None = None

    def stop(self, number: int) -> None:
        """Stop all by signal `number`: the router first, which needs its hosts for what it has accepted."""
        self._number = number

    def wait(self) -> int:
        """Watch until all have ended. When one has ended for good, all others are stopped.

        Returns:
            The exit code of the router's server, or, where that is 0, of the first host's that is not.

        Raises:
            ServingError: as `Supervisor.wait`.
        """
        with ThreadPoolExecutor(1 + len(self._hosts)) as pool:
            router = pool.submit(self._router.wait)
            hosts = [pool.submit(each.wait) for each in self._hosts]
            while self._number is None and not wait([router, *hosts], 0, FIRST_COMPLETED).done:
                time.sleep(_PERIOD_S)
            number = signal.SIGTERM if self._number is None else self._number
            _stop([self._router], [router], number)
            _stop(self._hosts, hosts, number)
        return next((code for code in (each.result() for each in (router, *hosts)) if code), 0)


def _stop(supervisors: Sequence[Supervisor], running: Sequence["Future[int]"], number: int) -> None:
    """Stop those that run, and wait until they have ended."""
    for supervisor, each in zip(supervisors, running, strict=True):
        if not each.done():
            supervisor.stop(number)
    wait(running)
