"""The target that gRPC connects to: one address as it is, or the IPv4 addresses that several addresses stand for.

gRPC resolves a single name, again whenever a connection is lost. It takes no list of names, so several are resolved
here: at first, and then every few seconds while they are used, on a thread that ends with its answer.
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
# Of each address, "ip:port" of all hosts that it stands for.
_Resolved = dict[str, tuple[str, ...]]


class Target:
    """The target of a channel, which changes with the addresses that its names stand for.

    Args:
        addresses: "host:port", one or several.

    Raises:
        ServerUnavailable: a name among several cannot be resolved.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._alone = addresses[0] if len(addresses) == 1 else None
        self._found: _Resolved = {} if self._alone else {address: _resolved(address) for address in addresses}
        self._next_s = time.monotonic() + _RESOLVE_S
        self._thread: threading.Thread | None = None

    def now(self) -> str:
        """The target. Several names are resolved again in the background if that was a few seconds ago."""
        if self._alone is not None:
            return self._alone
        if time.monotonic() >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._next_s = time.monotonic() + _RESOLVE_S
            self._thread = threading.Thread(target=self._resolve_again, name="resolve", daemon=True)
            with suppress(RuntimeError):  # no more threads: the addresses are the last ones
                self._thread.start()
        return f"ipv4:{','.join(dict.fromkeys(ip for ips in self._found.values() for ip in ips))}"

    def _resolve_again(self) -> None:
        """Resolve all names. One that cannot be resolved now keeps its last addresses, and the same ones their order:
        a DNS server answers in another order each time."""
        found = dict(self._found)
        for address, before in self._found.items():
            with suppress(ServerUnavailable):
                now = _resolved(address)
                found[address] = before if set(now) == set(before) else now
        self._found = found


def host_of(address: str) -> str:
    """The host of "host:port", without gRPC's scheme and the brackets of IPv6."""
    return _SCHEME.sub("", address).rpartition(":")[0].strip("[]")


def _resolved(address: str) -> tuple[str, ...]:
    try:
        port = int(address.rpartition(":")[2])
        found = socket.getaddrinfo(host_of(address), port, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ServerUnavailable(f"{address}: expected host:port of a host with an IPv4 address: {error}") from error
    return tuple(dict.fromkeys(":".join(map(str, each[4][:2])) for each in found))
