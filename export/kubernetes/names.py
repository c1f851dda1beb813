"""Names of Kubernetes objects, derived from names of models, which may have capitals, dots and underscores."""

import re
from collections.abc import Iterable

from serving.errors import ConfigurationError

# A label of a StatefulSet's pods is its name, a dash and a hash of ten letters. A label has at most 63 letters.
MOST_LETTERS = 52
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def kubernetes_name(model: str, chosen: str | None) -> str:
    """The name of a model's objects: in small letters, with a dash for each dot and underscore.

    Args:
        model: name of the model.
        chosen: the name to use instead.

    Raises:
        ConfigurationError: the name is invalid in Kubernetes.
    """
    name = _default_name(model) if chosen is None else chosen
    if not _NAME.fullmatch(name):
        source = "--name" if chosen is not None else f"model {model!r}"
        raise ConfigurationError(
            f"{source}: expected a name that Kubernetes takes, small letters, digits and dashes, a letter first, "
            f"got {name!r}: give one, --name"
        )
    return name


def check_names(names: Iterable[str], others: Iterable[str]) -> None:
    """Refuse names that are too long, or that the objects of another model would also have.

    Args:
        names: of all objects.
        others: the other models of the repository.

    Raises:
        ConfigurationError: with the names of both models.
    """
    models_by_name = {_default_name(other): other for other in others}
    for name in names:
        if len(name) > MOST_LETTERS:
            raise ConfigurationError(
                f"{name}: expected at most {MOST_LETTERS} letters, got {len(name)}: give a shorter one, --name"
            )
        if name in models_by_name:
            raise ConfigurationError(
                f"{name}: expected a name of its own, got the name of model {models_by_name[name]!r} of the same "
                "repository: give another, --name"
            )


def _default_name(model: str) -> str:
    return re.sub(r"[._]", "-", model.lower()).strip("-")
