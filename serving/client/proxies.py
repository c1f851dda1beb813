"""The HTTP proxy that gRPC connects through, from environment variables. Never used for this machine itself."""

import ipaddress
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from serving.client.targets import address_host

# The variables that gRPC reads, in order of precedence:
# https://grpc.github.io/grpc/core/md_doc_environment_variables.html
_PROXY = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")


def may_be_proxied(addresses: Sequence[str]) -> bool:
    """Whether gRPC may connect to these addresses through a proxy.

    A proxy cannot reach this machine. With several addresses, gRPC would ask the proxy for one host with all of them
    as its name.
    """
    return len(addresses) == 1 and not _is_loopback(address_host(addresses[0]))


def proxy_note(addresses: Sequence[str]) -> str | None:
    """A note for a connection's error about the proxy that it used, or None if it used none."""
    if not may_be_proxied(addresses):
        return None
    variable = next((name for name in _PROXY if os.environ.get(name)), None)
    host = address_host(addresses[0])
    no_proxy = next((os.environ[name] for name in _NO_PROXY if name in os.environ), "").split(",")
    if variable is None or any(_matches(entry.strip(), host) for entry in no_proxy):
        return None
    proxy = urlsplit(os.environ[variable])
    shown = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"  # without its user and password
    return f"connected through the proxy {shown}, set by {variable}: no_proxy={host} connects directly"


def _matches(rule: str, host: str) -> bool:
    """Whether an entry of no_proxy matches this host: the end of its name, or a network with its address."""
    if not rule:
        return False
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(rule, strict=False)
    except ValueError:
        return host.lower().endswith(rule.lower())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost")
