"""The models of a repository, and pins: the versions of them that a server has to serve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.bundle.manifest import MANIFEST
from serving.bundle.opening import check_published
from serving.errors import ConfigurationError

# The versions to serve, by model, whatever config.pbtxt says.
Pins = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and its ready versions."""

    name: str
    versions: tuple[int, ...]


def find_models(repository: Path) -> tuple[str, ...]:
    """The models of a repository that tbe-export made.

    Raises:
        ConfigurationError: there is no repository, or no exported model in it.
    """
    if not repository.is_dir():
        raise ConfigurationError(f"{repository}: expected a model repository, found no folder: tbe-export makes one")
    models = sorted({path.parent.parent.name for path in repository.glob(f"*/*/{MANIFEST}")})
    if not models:
        raise ConfigurationError(f"{repository}: expected models made by tbe-export, found none")
    return tuple(models)


def check_pins(repository: Path, models: Sequence[str], pins: Pins) -> None:
    """Refuse pins that name a missing model or version.

    Raises:
        ConfigurationError: naming what is missing, and the models or versions that exist.
    """
    for model, pinned in pins.items():
        if model not in models:
            raise ConfigurationError(f"{repository}: expected one of the models {', '.join(models)}, got {model!r}")
        check_published(repository / model, pinned)
