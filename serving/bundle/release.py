"""A release: a file of the repository that names the versions of a model to serve.

The file is REPOSITORY/NAME.release.json, and its signature is REPOSITORY/NAME.release.sig. It is not in the model's
folder, because Triton reloads all versions if a file there changes. Triton ignores files in the repository itself.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from serving.errors import BundleError
from serving.files import UNREADABLE, Strict, read_file

if TYPE_CHECKING:
    from serving.bundle.signature import TrustedKeys

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Release(Strict, frozen=True):
    """The versions of a model to serve.

    Attributes:
        versions: the versions to serve. The newest of them answers requests that name no version.
        sequence: a number greater than in all earlier releases, so that a restored old file is refused: Unix time in
            milliseconds, or one more than in the previous release.
    """

    versions: Annotated[tuple[_Positive, ...], msgspec.Meta(min_length=1)]
    sequence: _Positive


def release_path(model: Path) -> Path:
    """The path of a model's release. `model` is its folder, <repository>/<name>."""
    model = Path(os.path.abspath(model))
    return model.with_name(f"{model.name}.release.json")


def read_release(model: Path, trusted: "TrustedKeys | None" = None) -> Release | None:
    """The release of a model, or None.

    Args:
        model: the model's folder, <repository>/<name>.
        trusted: one of these keys must have signed the release for this model. None: no signature is needed.

    Raises:
        BundleError: the file cannot be read, is not a release, or has no signature by one of the keys.
    """
    path = release_path(model)
    if not os.path.lexists(path):
        return None
    if trusted is None:
        try:
            content = read_file(path)
        except OSError as error:
            raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    else:
        content = trusted.read_signed(
            path, Path(os.path.abspath(model)).name, again="`tbe-export release --signing-key`"
        )
    try:
        return msgspec.json.decode(content, type=Release)
    except UNREADABLE as error:
        raise BundleError(f"{path}: expected what `tbe-export release` writes: {error}") from error


def next_release(versions: Sequence[int], before: Release | None) -> Release:
    """A release of `versions`, without duplicates, that replaces `before`."""
    least = 1 if before is None else before.sequence + 1
    return Release(versions=tuple(dict.fromkeys(versions)), sequence=max(least, time.time_ns() // 1_000_000))
