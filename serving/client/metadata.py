"""gRPC metadata that a client sends with each call, such as a token."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from serving.errors import ConfigurationError
from serving.files import UNREADABLE, read_file

Metadata = Mapping[str, str | bytes] | Callable[[], Mapping[str, str | bytes]]

# "Custom-Metadata" of https://grpc.github.io/grpc/core/md_doc__p_r_o_t_o_c_o_l-_h_t_t_p2.html
_KEY = re.compile(r"[0-9A-Za-z_.-]+")
_TEXT = re.compile(r"[\x20-\x7e]*")
_BINARY = "-bin"


def check_metadata(metadata: Any) -> None:
    """Refuse metadata that gRPC cannot send. Messages omit values, which may be secrets.

    Raises:
        ConfigurationError: gRPC cannot send a key or its value. The message names the key.
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


class MetadataFile:
    """Metadata from a file, a JSON object of strings. A changed file is read again, so tokens can be rotated.

    Args:
        path: the file.

    Raises:
        ConfigurationError: the file cannot be read, or gRPC cannot send its metadata.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self._metadata: dict[str, str] = {}
        self()

    def __call__(self) -> dict[str, str]:
        """The metadata of the next call. While the file is invalid, this is its last valid content."""
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_ino) == self._file_id:
                return self._metadata
            metadata = msgspec.json.decode(read_file(self._path, follow=True), type=dict[str, str])
            check_metadata(metadata)
        except (OSError, ConfigurationError, *UNREADABLE) as error:
            if self._file_id is not None:
                return self._metadata
            if isinstance(error, OSError):
                raise ConfigurationError(f"{self._path}: {error.strerror}") from error
            raise ConfigurationError(f"{self._path}: expected a JSON object of strings: {error}") from error
        self._metadata, self._file_id = metadata, (stat.st_mtime_ns, stat.st_ino)
        return metadata


def check_text(name: str, value: Any) -> None:
    """Refuse a value that gRPC cannot send as text. The error calls it `name`.

    Raises:
        ConfigurationError: it is not str, or has other characters than printable ASCII.
    """
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: expected str, got {type(value).__name__}")
    if not _TEXT.fullmatch(value):
        raise ConfigurationError(f"{name}: expected printable ASCII characters, got others")
