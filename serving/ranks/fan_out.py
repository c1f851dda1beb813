"""What is asked of all hosts at once, on an event loop."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from serving.errors import HostUnavailable, InternalError, ModelNotFound
from serving.ranks.host import Host

T = TypeVar("T")
# The pause between two questions to a host that does not answer yet, in seconds.
_POLL_S = 0.2


async def check_all(hosts: Mapping[int, Host], patience_s: float) -> None:
    """Find out whether every host has a replica with its bundle.

    Args:
        hosts: by rank.
        patience_s: how long hosts are waited for that do not answer, in seconds.

    Raises:
        HostUnavailable: naming each host that lacks its bundle, or does not answer.
    """
    deadline = time.monotonic() + patience_s
    found = await asyncio.gather(*(_check(host, deadline) for host in hosts.values()))
    if wrong := [each for each in found if each is not None]:
        raise HostUnavailable("; ".join(wrong))


async def _check(host: Host, deadline: float) -> str | None:
    while True:
        try:
            await host.check()
        except (ModelNotFound, InternalError) as error:
            return str(error)
        except HostUnavailable as error:
            if time.monotonic() + _POLL_S >= deadline:
                return str(error)
        else:
            return None
        await asyncio.sleep(_POLL_S)


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hosts", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine there, while the caller does something else."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End the thread. Coroutines that still run there are not waited for."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
