"""Which version of a model is to be served."""

import os
from pathlib import Path

from serving.bundle.opening import newest
from serving.bundle.signature import TrustedKeys
from serving.model.config_file import CONFIG, read_config, settings_of


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
