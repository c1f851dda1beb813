"""Switch a running server to other versions of a model."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.backend.recorder import check_capture
from serving.bundle.load import open_bundle, versions
from serving.files import locked_file
from serving.model.config_file import OURS, as_json, point_at, read_config, settings_of
from serving.requests.captured import WARM_UP, read_captured
from serving.router.hosts_config import hosts_of
from serving.server.private_folder import PrivateFolder
from serving.triton.control import UNIX, Control


@dataclass(frozen=True, slots=True)
class Switched:
    """The versions that served before the switch and after it."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def switch(
    control: Control,
    model: str,
    requested: Sequence[int],
    *,
    repository: Path,
    serving_on: Sequence[int] = (),
    private: PrivateFolder | None = None,
    hosts: Mapping[str, str] | None = None,
) -> Switched:
    """Serve exactly the `requested` versions of a model and the versions `serving_on`.

    The old versions serve until all new ones are ready, so that no request fails.

    Args:
        control: the server's control API.
        model: the model's name.
        requested: the versions to serve. An empty list stands for the versions that config.pbtxt names.
        repository: the repository that Triton serves. Versions are loaded with the current config.pbtxt, even if
            Triton read it earlier and got another config since.
        serving_on: versions that already serve and continue to serve.
        private: the private folder that the server serves. Signed versions are copied into it first.
        hosts: of a router, the addresses of its hosts in place of the addresses in config.pbtxt; see `point_at`.

    Raises:
        ServingError: a version is missing, not signed, or cannot be loaded. The old versions continue to serve.
    """
    with nullcontext() if private is None else private.locked(), loading(control):
        before = control.ready(model)
        if private is not None:
            for version in requested or (None,):
                private.bring(model, version, serving={*before, *requested})
        config = read_config(repository / model)
        if hosts is not None:
            point_at(config, hosts)
        check_loadable(repository / model, config, requested)
        return Switched(before, control.load(model, sorted({*requested, *serving_on}), as_json(config)))


@contextmanager
def loading(control: Control, *, alone: bool = False) -> Iterator[None]:
    """During the block, the process that `control` reaches is not replaced (`Server.adopt`).

    Args:
        control: a server's control API. If it is not a Unix socket, processes are never replaced.
        alone: wait until no other process is in such a block, and keep others from entering one.
    """
    with ExitStack() as stack:
        if control.address.startswith(UNIX):
            with suppress(FileNotFoundError):  # the server has ended: the next call says so
                lock = Path(f"{control.address.removeprefix(UNIX)}.lock")
                stack.enter_context(locked_file(lock, shared=not alone))
        yield


def check_loadable(model: Path, config: Any, requested: Sequence[int]) -> None:
    """Refuse settings and bundles that the backend would refuse.

    Triton 2.51 may crash (`malloc_consolidate`) a few requests after it was asked repeatedly for a version that
    cannot be loaded.

    Args:
        model: the model's folder, <repository>/<name>.
        config: the ModelConfig.
        requested: the versions to load. An empty list stands for the versions that `config` names. Triton refuses
            missing versions.

    Raises:
        ConfigurationError: a setting, or a file that it names, cannot be used.
        BundleError: a bundle is damaged, or too new.
    """
    if OURS not in config.parameters:
        return
    settings, published = settings_of(config), versions(model)
    for version in requested or configured_versions(config, published):
        if version in published:
            manifest = open_bundle(model / str(version)).manifest
            if manifest.hosts:
                hosts_of(settings).check(manifest)
    if os.path.lexists(model / WARM_UP):
        for _ in read_captured(model / WARM_UP):
            pass
    check_capture(settings, model.name)


def configured_versions(config: Any, published: Sequence[int]) -> Sequence[int]:
    """The existing versions that config.pbtxt names, oldest first."""
    policy = config.version_policy
    if policy.WhichOneof("policy_choice") == "specific":
        return tuple(policy.specific.versions)
    return published if policy.HasField("all") else published[-(policy.latest.num_versions or 1) :]
