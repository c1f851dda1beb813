"""Which versions of a model are to be served, and whether a new one can stand beside them."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export.errors import PublishError
from serving.bundle.manifest import Manifest
from serving.bundle.opening import check_published, newest
from serving.bundle.release import Release, next_release, read_release, release_of
from serving.bundle.signature import TrustedKeys, sign
from serving.errors import BundleError
from serving.files import replacing
from serving.model.config_file import CONFIG, parameters_of, read_config, settings_of
from serving.model.settings import ServingSettings


def bundle_of(path: Path, trusted: TrustedKeys | None = None) -> Path:
    """The bundle that `path` names.

    Args:
        path: a bundle, <model>/<version>, or the folder of a model. The model's settings then say which version.
        trusted: one of these keys must have signed the settings. None: anybody may have written them.

    Raises:
        BundleError: `trusted` did not sign the settings, or there is no version.
        ConfigurationError: the settings cannot be read.
    """
    if not os.path.lexists(path / CONFIG):
        return path
    return path / str(settings_of(read_config(path, trusted)).version or newest(path))


def check_compatible(model: Path, manifest: Manifest, settings: ServingSettings | None) -> None:
    """Refuse a new version with another contract or other settings than the versions already there.

    Args:
        model: the published model's folder.
        manifest: the new version's.
        settings: how the new version is to be served; None takes the model's settings.

    Raises:
        PublishError: features, dims, weights, dtypes of ids or output, or settings differ.
        ConfigurationError: the model's config.pbtxt cannot be read.
    """
    config = read_config(model)
    served = settings_of(config)
    parameters = parameters_of(config)
    if parameters.get("contract") != manifest.contract:
        features = ",".join(feature.name for feature in manifest.features)
        raise PublishError(
            f"{model / CONFIG}: expected the contract of the versions already there (features "
            f"{parameters.get('features')}, dims {parameters.get('dims')}), "
            f"got features {features}, dims {','.join(str(t.dim) for t in manifest.feature_tables)}, "
            f"{manifest.id_dtype.value} ids, {manifest.output_dtype.value} out, "
            f"{'weighted' if manifest.weighted else 'unweighted'}: "
            "clients would break; publish under another name"
        )
    if settings is not None and settings != served:
        wanted, has = asdict(settings), asdict(served)
        differ = ", ".join(f"{name} {has[name]}, not {wanted[name]}" for name in has if has[name] != wanted[name])
        raise PublishError(
            f"{model / CONFIG}: expected the settings that the model is served with: {differ}: "
            f"publish without settings, then `tbe-serve configure {model}`"
        )


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
