"""What a server is about to serve was signed by a trusted key, and runs no other code than ours.

Triton runs a version's model.py, and whatever config.pbtxt names, before any code of ours could look at them: so
this is done before it is asked to.
"""

from pathlib import Path

from serving.bundle import MODEL, open_bundle, versions
from serving.config_file import CONFIG, read_config, settings_of
from serving.errors import BundleError, ConfigurationError
from serving.settings import PARAMETERS
from serving.signature import TrustedKeys

# Parameters of ours; of others, EXECUTION_ENV_PATH names a Python that is run.
_PARAMETERS = {"features", "keys", "dims", "weighted", "contract", *PARAMETERS}
# What else of config.pbtxt can name code, and what of it is ours.
_CODE_FIELDS = ("backend", "default_model_filename", "cc_model_filenames", "model_operations", "runtime", "platform")
_OURS = {"backend": "python", "default_model_filename": MODEL}


def check_trusted(model: Path, keys: Path, version: int | None = None) -> None:
    """Refuse a model whose version was not signed by one of the keys in `keys`, or whose config names other code.

    Args:
        model: `<repository>/<name>`.
        keys: a PEM file of public keys.
        version: the version that is to be served; the one that config.pbtxt says where None.

    Raises:
        BundleError: the version is missing, changed, or not signed by one of the keys.
        ConfigurationError: the keys or config.pbtxt cannot be read, or config.pbtxt names other code.
    """
    trusted = TrustedKeys.read(keys)
    config = read_config(model)
    foreign = [name for name in config.parameters if name not in _PARAMETERS]
    said = {field.name: value for field, value in config.ListFields() if field.name in _CODE_FIELDS}
    foreign += [name for name in said | _OURS if said.get(name) != _OURS.get(name)]
    if foreign:
        raise ConfigurationError(
            f"{model / CONFIG}: {foreign[0]}: expected nothing that could name other code than a signed bundle's"
        )
    found = versions(model)
    if not found:
        raise BundleError(f"{model}: expected versions made by tbe-export, found none")
    open_bundle(model / str(version or settings_of(config).version or found[-1]), trusted)
