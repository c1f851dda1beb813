"""One config.pbtxt for all versions of a model: they have to share what it says."""

from pathlib import Path

from export.errors import PublishError
from serving.bundle import Manifest
from serving.config_file import CONFIG, parameters_of, read_config, settings_of
from serving.errors import ConfigurationError
from serving.settings import ServingSettings


def check_model(model: Path, manifest: Manifest, settings: ServingSettings | None) -> None:
    """Compare a published model with a new version: all versions share one contract and one config.pbtxt.

    Raises:
        PublishError: the features, dims, weights or output dtype differ, or other settings were asked for than it
            has, or its config.pbtxt cannot be read.
    """
    try:
        config = read_config(model)
        served = settings_of(config)
    except ConfigurationError as error:
        raise PublishError(str(error)) from error
    parameters = parameters_of(config)
    if parameters.get("contract") != manifest.contract:
        features = ",".join(feature.name for feature in manifest.features)
        raise PublishError(
            f"{model / CONFIG}: expected the contract of the versions already there (features "
            f"{parameters.get('features')}, dims {parameters.get('dims')}), "
            f"got features {features}, dims {','.join(str(t.dim) for t in manifest.feature_tables)}, "
            f"{manifest.output_dtype.value} out, {'weighted' if manifest.weighted else 'unweighted'}: "
            "clients would break; publish under another name"
        )
    if settings is not None and settings != served:
        raise PublishError(
            f"{model / CONFIG}: expected the settings that the model is served with, {served}, got {settings}: "
            f"publish without them, then `tbe-serve configure {model}`"
        )
