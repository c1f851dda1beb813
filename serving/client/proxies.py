"""The HTTP proxy that gRPC asks for a connection, as the environment says; never for this machine itself."""

import ipaddress
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from serving.client.targets import host_of

# The variables that gRPC reads, in their order:
# https://grpc.github.io/grpc/core/md_doc_environment_variables.html
_PROXY = ("grpc_proxy", "https_proxy", "http_proxy")
_WITHOUT = ("no_grpc_proxy", "no_proxy")


def may_be_proxied(addresses: Sequence[str]) -> bool:
    """Whether gRPC may ask a proxy for these addresses.

    Not for this machine, which a proxy does not reach. Nor for several addresses: gRPC would ask for all of them as
    the name of one host.
    """
    return len(addresses) == 1 and not _is_loopback(host_of(addresses[0]))


def proxy_note(addresses: Sequence[str]) -> str | None:
    """What an error of a connection says of the proxy that it was made through. None: through none."""
    if not may_be_proxied(addresses):
        return None
    variable = next((name for name in _PROXY if os.environ.get(name)), None)
    host = host_of(addresses[0])
    if variable is None or any(_leaves_out(rule.strip(), host) for rule in _rules()):
        return None
    proxy = urlsplit(os.environ[variable])
    shown = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"  # without its user and password
    return f"asked through the proxy {shown}, as {variable} says: no_proxy={host} asks the server itself"


def _rules() -> list[str]:
    return next((os.environ[name] for name in _WITHOUT if name in os.environ), "").split(",")


def _leaves_out(rule: str, host: str) -> bool:
    """Whether an entry of no_proxy names this host: the end of its name, or a network that its address is in."""
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
