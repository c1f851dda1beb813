"""What a client sends beside each call: gRPC's metadata, such as a token."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from serving.errors import ConfigurationError

Metadata = Mapping[str, str | bytes] | Callable[[], Mapping[str, str | bytes]]

# "Custom-Metadata" of https://grpc.github.io/grpc/core/md_doc__p_r_o_t_o_c_o_l-_h_t_t_p2.html
_KEY = re.compile(r"[0-9A-Za-z_.-]+")
_TEXT = re.compile(r"[\x20-\x7e]*")
_BINARY = "-bin"


def check_metadata(metadata: Any) -> None:
    """Refuse what gRPC cannot send. Errors leave values out: they are secrets.

    Raises:
        ConfigurationError: naming the key that cannot be sent, or whose value cannot.
    """
    if not isinstance(metadata, Mapping):
        raise ConfigurationError(f"metadata: expected keys with values, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigurationError(
                f"metadata {key!r}: expected a key of ASCII letters, digits, '_', '.' and '-', such as authorization"
            )
        if key.lower().endswith(_BINARY):
            if not isinstance(value, bytes):
                raise ConfigurationError(f"metadata {key!r}: expected bytes, got {type(value).__name__}")
        else:
            check_text(f"metadata {key!r}", value)


def check_text(name: str, value: Any) -> None:
    """Refuse a value that gRPC cannot send as text; `name` is for the error.

    Raises:
        ConfigurationError: it is not str, or has other characters than printable ASCII.
    """
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: expected str, got {type(value).__name__}")
    if not _TEXT.fullmatch(value):
        raise ConfigurationError(f"{name}: expected printable ASCII characters, got others")
