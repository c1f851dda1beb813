"""Whether a new version can stand beside those already published: they share one config.pbtxt."""

from dataclasses import asdict
from pathlib import Path

from export.errors import PublishError
from serving.bundle.manifest import Manifest
from serving.model.config_file import CONFIG, parameters_of, read_config, settings_of
from serving.model.settings import ServingSettings


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
