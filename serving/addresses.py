"""Addresses of servers, as people write them."""

import re

_NAME = r"[A-Za-z0-9_.-]{1,253}"
_ADDRESS = re.compile(rf"(?:(?:dns|ipv4|ipv6):(?:///)?)?(?:{_NAME}|\[[0-9A-Fa-f:.%]{{2,60}}\]):[0-9]{{1,5}}")
_MOST_PORT = 65535


def is_host_name(text: str) -> bool:
    """Whether a host may be called so: a name, or an IPv4 address."""
    return re.fullmatch(_NAME, text) is not None


def is_address(text: str) -> bool:
    """Whether this is the address of a server, for gRPC.

    It is the name or IP address of a host, with IPv6 in brackets, and a port. gRPC may be told how to resolve the
    name, as in "dns:///name:8001".
    """
    return _ADDRESS.fullmatch(text) is not None and int(text.rpartition(":")[2]) <= _MOST_PORT
