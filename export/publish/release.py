"""Say which versions of a model the servers that follow its releases are to serve."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export.errors import PublishError
from serving.bundle.opening import check_published
from serving.bundle.release import Release, next_release, read_release, release_of
from serving.bundle.signature import sign
from serving.errors import BundleError
from serving.files.replacing import replacing
from serving.model.config_file import read_config


def release(model: Path, versions: Sequence[int], signing_key: Ed25519PrivateKey | None = None) -> Release:
    """Write the release of a model. A reader sees the old one or the new one.

    Args:
        model: the model's folder, <repository>/<name>.
        versions: what is to be served.
        signing_key: signs the release. None: it is not signed.

    Raises:
        ConfigurationError: there is no such model, or a version is not published.
        PublishError: the repository cannot be written to.
    """
    read_config(model)
    check_published(model, versions)
    before = None
    with suppress(BundleError):  # what cannot be read is replaced
        before = read_release(model)
    new = next_release(versions, before)
    path, content = release_of(model), msgspec.json.encode(new)
    try:
        with replacing(path) as file:
            file.write(content)
        if signing_key is not None:
            sign(path, content, signing_key, Path(os.path.abspath(model)).name)
    except OSError as error:
        raise PublishError(f"{path}: cannot be written: {error.strerror}") from error
    return new
