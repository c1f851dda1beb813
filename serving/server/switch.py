"""Switch the versions of a model that a running server serves: for `tbe-serve load`, pins and releases."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from serving.model.config_file import as_json, read_config
from serving.server.private import PrivateFolder
from serving.triton.control import Control


@dataclass(frozen=True, slots=True)
class Switched:
    """The versions that served before, and those that serve now."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def switch(
    control: Control,
    model: str,
    versions: Sequence[int] = (),
    *,
    repository: Path,
    beside: Sequence[int] = (),
    private: PrivateFolder | None = None,
) -> Switched:
    """Serve exactly `versions` of a model, and those `beside` them.

    What serves goes on until all are ready, and no request fails.

    Args:
        control: the server's control API.
        model: the model's name.
        versions: none: those that config.pbtxt says.
        repository: what Triton serves: versions are loaded with the config.pbtxt that is there, also if Triton has
            seen it already, and was given another config since.
        beside: versions that serve already, and go on.
        private: the private folder that the server serves. Signed versions are copied into it first.

    Raises:
        ServingError: a version is missing, not signed, or cannot be loaded. What served before goes on.
    """
    with nullcontext() if private is None else private.locked():
        before = control.ready(model)
        if private is not None:
            for version in versions or (None,):
                private.bring(model, version, serving={*before, *versions})
        config = as_json(read_config(repository / model))
        return Switched(before, control.load(model, sorted({*versions, *beside}), config))
