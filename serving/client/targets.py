"""The target that gRPC connects to: a single address unchanged, or the IPv4 addresses that several names resolve to.

gRPC resolves a single name itself, and again whenever a connection is lost. It does not take a list of names, so this
module resolves several: at the start, and every few seconds while the target is used, on a short-lived thread.
"""

import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from serving.errors import ServerUnavailable

# Seconds between two resolutions of several names. Kubernetes' DNS keeps its answers for 5 s, CoreDNS' default.
_RESOLVE_S = 5.0
_SCHEME = re.compile(r"^(dns|ipv4|ipv6):(///)?")
# By address, "ip:port" of each host that its name resolves to.
_Resolved = dict[str, tuple[str, ...]]


class Target:
    """The target of a channel, which follows the addresses that its names resolve to.

    Args:
        addresses: "host:port", one or several.

    Raises:
        ServerUnavailable: a name among several cannot be resolved.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._alone = addresses[0] if len(addresses) == 1 else None
        self._resolved: _Resolved = {} if self._alone else {address: _resolve(address) for address in addresses}
        self._next_s = time.monotonic() + _RESOLVE_S
        self._thread: threading.Thread | None = None

    def now(self) -> str:
        """The current target. Several names are resolved again in the background every few seconds."""
        if self._alone is not None:
            return self._alone
        if time.monotonic() >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._next_s = time.monotonic() + _RESOLVE_S
            self._thread = threading.Thread(target=self._resolve_again, name="resolve", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: keep the last addresses
                self._thread.start()
        return f"ipv4:{','.join(dict.fromkeys(ip for ips in self._resolved.values() for ip in ips))}"

    def _resolve_again(self) -> None:
        """Resolve all names. A name that cannot be resolved keeps its last addresses. Unchanged addresses keep their
        order, which DNS servers rotate."""
        resolved = dict(self._resolved)
        for address, before in self._resolved.items():
            with suppress(ServerUnavailable):
                now = _resolve(address)
                resolved[address] = before if set(now) == set(before) else now
        self._resolved = resolved


def address_host(address: str) -> str:
    """The host of "host:port", without gRPC's scheme and the brackets of IPv6."""
    return _SCHEME.sub("", address).rpartition(":")[0].strip("[]")


def _resolve(address: str) -> tuple[str, ...]:
    try:
        port = int(address.rpartition(":")[2])
        results = socket.getaddrinfo(address_host(address), port, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ServerUnavailable(f"{address}: expected host:port of a host with an IPv4 address: {error}") from error
    return tuple(dict.fromkeys(":".join(map(str, socket_address[:2])) for *_, socket_address in results))
