"""Published versions: find one by a path, release them, and remove old ones with their deltas."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export.errors import PublishError
from export.publish.lineage import LineageFolder, locate_deltas
from serving.bundle.delta import open_delta
from serving.bundle.lineage import MOST_DELTAS, Step, next_step, reached
from serving.bundle.load import (
    Bundle,
    check_published,
    in_use,
    newest,
    open_bundle,
    remove_version,
    verify_digests,
    versions,
)
from serving.bundle.manifest import MANIFEST
from serving.bundle.plan import is_host_model
from serving.bundle.release import Release, next_release, read_release, release_path
from serving.bundle.signature import TrustedKeys, sign
from serving.errors import BundleError, ConfigurationError
from serving.files import replacing
from serving.model.config_file import CONFIG, read_config, settings_of


def bundle_of(path: Path, trusted: TrustedKeys | None) -> Path:
    """The bundle that `path` names.

    Args:
        path: a bundle, <model>/<version>, or the folder of a model. For a model, its settings choose the version.
        trusted: one of these keys must have signed the settings. None: signatures are not checked.

    Raises:
        BundleError: none of the keys signed the settings, or the model has no version.
        ConfigurationError: the settings cannot be read.
    """
    if not os.path.lexists(path / CONFIG):
        return path
    return path / str(settings_of(read_config(path, trusted)).version or newest(path))


def release(
    model: Path, versions: Sequence[int], signing_key: Ed25519PrivateKey | None = None, *, verify: bool = False
) -> Release:
    """Write the release of a model, atomically.

    Args:
        model: the model's folder, <repository>/<name>.
        versions: the versions to serve.
        signing_key: signs the release. None: it is not signed.
        verify: whether to compare every file of these versions with its digest first.

    Raises:
        ConfigurationError: the model does not exist, or a version is not published.
        BundleError: a version is damaged.
        PublishError: the repository cannot be written to.
    """
    read_config(model)
    check_published(model, versions)
    for version in versions if verify else ():
        verify_digests(open_bundle(model / str(version)))
    before = None
    with suppress(BundleError):  # an unreadable release is replaced
        before = read_release(model)
    new = next_release(versions, before)
    path, content = release_path(model), msgspec.json.encode(new)
    try:
        with replacing(path) as file:
            file.write(content)
        if signing_key is not None:
            sign(path, content, signing_key, Path(os.path.abspath(model)).name)
    except OSError as error:
        raise PublishError(f"{path}: cannot be written: {error.strerror}") from error
    return new


@dataclass(frozen=True, slots=True)
class Fate:
    """The result of `prune` for a version.

    Attributes:
        version: its number.
        kept_because: why it stays. None: it was removed.
        deltas: the number of deltas that were removed with it.
    """

    version: int
    kept_because: str | None
    deltas: int = 0


def prune(model: Path, keep: int, *, dry_run: bool = False, deltas: Path | str | None = None) -> Iterator[Fate]:
    """Remove old versions of a model.

    A version stays if it is one of the newest `keep`, if a process has it open, if config.pbtxt or the model's
    release chooses it, or if a router's bundle in the same repository names it. All versions stay while a bundle of
    the router cannot be read.

    Args:
        model: `<repository>/<name>`.
        keep: how many of the newest versions always stay, 1 or more.
        dry_run: whether to remove nothing.
        deltas: the folder of all deltas, or its URL in a store. None: REPOSITORY.deltas.

    Yields:
        The fate of each version, newest first. A version is first renamed; then its files are removed, and the deltas
        of its lineage, unless another version needs them.

    Raises:
        PublishError: a version cannot be removed.
        ConfigurationError: `keep` is less than 1, or the model does not exist.
        BundleError: the model's release cannot be read.
        ServerUnavailable: the store of the deltas cannot be reached, or refuses removals.
    """
    if keep < 1:
        raise ConfigurationError(f"keep: expected 1 or more, got {keep}")
    model = Path(os.path.abspath(model))  # a path such as ".." does not end in the model's name
    configured = settings_of(read_config(model)).version
    routed, unread = _named_by_routers(model)
    released = read_release(model)
    folder, store = locate_deltas(model.parent, deltas)
    remaining = versions(model)
    for position, version in enumerate(reversed(versions(model))):
        path = model / str(version)
        if position < keep:
            yield Fate(version, f"among the newest {keep}")
        elif version == configured:
            yield Fate(version, "config.pbtxt says to serve it")
        elif version in routed:
            yield Fate(version, f"{routed[version]} names it")
        elif unread is not None:
            yield Fate(version, f"{unread} may name it, and cannot be read")
        elif released is not None and version in released.versions:
            yield Fate(version, "its release says to serve it")
        else:
            removed = _bundle(path)
            if not (_is_unused(path) if dry_run else _remove(path)):
                yield Fate(version, "in use")
                continue
            remaining.remove(version)
            unneeded = 0
            if removed is not None:
                lineage = LineageFolder(folder, model.name, removed.lineage, store=store)
                unneeded_steps = _unneeded_deltas(lineage, [model / str(number) for number in remaining])
                unneeded = len(unneeded_steps)
                if not dry_run:
                    lineage.remove(unneeded_steps)
            yield Fate(version, None, unneeded)


def prune_squashed(model: Path, *, dry_run: bool = False, deltas: Path | str | None = None) -> int:
    """Remove the deltas that squashed ones replace for every version of a model. The squashed ones are checked first.

    Rows can then no longer be rolled back to a state between two removed deltas.

    Args:
        model, dry_run, deltas: as for `prune`.

    Returns:
        How many were removed, or would be.

    Raises:
        BundleError: a version, whose deltas are then unknown, cannot be read; or a squashed delta cannot be read, or
            is damaged.
        ServerUnavailable: the store of the deltas cannot be reached, or refuses removals.
    """
    model = Path(os.path.abspath(model))
    folder, store = locate_deltas(model.parent, deltas)
    needed = defaultdict(list)
    for version in versions(model):
        bundle = open_bundle(model / str(version))
        needed[bundle.lineage].append(bundle.manifest)
    removed = 0
    for name, manifests in needed.items():
        lineage = LineageFolder(folder, model.name, name, store=store)
        steps = lineage.steps()
        if any(step.is_squashed for step in steps):
            next_steps = [next_step(steps, manifest.sequence) for manifest in manifests]
            replaced = [step for step in steps if step.sequence < min(next_steps).sequence]
            if replaced:
                lineage.fetch(min(next_steps).sequence - 1)
                for step in {step for step in next_steps if step.is_squashed}:
                    open_delta(lineage.path, step, manifests[0])
            removed += len(replaced)
            if not dry_run:
                lineage.remove(replaced)
    return removed


def read_deltas(bundle: Bundle, deltas: Path | str | None) -> tuple[int, list[str]]:
    """Read the deltas of a version that are newer than its rows.

    Args:
        bundle: the version's bundle.
        deltas: as for `prune`.

    Returns:
        How many there are, including squashed ones; and a line for each that is damaged, does not fit, or is missing.

    Raises:
        ServerUnavailable: the store of the deltas cannot be reached.
    """
    manifest = bundle.manifest
    model = Path(os.path.abspath(bundle.path)).parent
    all_deltas, store = locate_deltas(model.parent, deltas)
    folder = LineageFolder(all_deltas, model.name, bundle.lineage, manifest.sequence, store)
    steps = [step for step in folder.steps() if step.sequence > manifest.sequence]
    folder.fetch(manifest.sequence)
    problems = []
    for step in steps:
        try:
            open_delta(folder.path, step, manifest)
        except BundleError as error:
            problems.append(str(error))
    if steps and (last := reached(steps, manifest.sequence)) < steps[-1].sequence:
        problems.append(f"{bundle.path}: delta {last + 1} is missing, and {steps[-1].sequence} is there")
    return len(steps), problems


def _named_by_routers(model: Path) -> tuple[dict[int, str], str | None]:
    """The versions of a host's model that routers need.

    Returns:
        The router's bundle that names each of them, by their numbers; and a bundle of this host's router that cannot
        be read, such as one of a newer tbe-serving, or None.
    """
    named: dict[int, str] = {}
    unread = None
    for manifest in sorted(model.parent.glob(f"*/*/{MANIFEST}")):
        router, version = manifest.parent.parent.name, manifest.parent.name
        try:
            hosts = open_bundle(manifest.parent).manifest.hosts
        except BundleError:
            if is_host_model(model.name, router):
                unread = f"{router} version {version}"
            continue
        for host in hosts:
            if host.model == model.name:
                named[host.version] = f"{router} version {version}"
    return named, unread


def _is_unused(version: Path) -> bool:
    with in_use(version) as used:
        return not used


def _remove(version: Path) -> bool:
    """Remove a version, unless a process has it open. Returns whether it was removed."""
    try:
        return remove_version(version)
    except OSError as error:
        raise PublishError(f"{version}: cannot be removed: {error.strerror}") from error


def _bundle(version: Path) -> Bundle | None:
    """The bundle of a version, or None if it cannot be read, such as one of a newer tbe-serving."""
    with suppress(BundleError):
        return open_bundle(version)
    return None


def _unneeded_deltas(lineage: LineageFolder, remaining: Iterable[Path]) -> list[Step]:
    """The deltas of a removed version's lineage that no remaining version needs."""
    bundles = [_bundle(path) for path in remaining]
    readable = [bundle for bundle in bundles if bundle is not None]
    if len(readable) < len(bundles):  # the unreadable one may need them
        return []
    in_rows = [bundle.manifest.sequence for bundle in readable if bundle.lineage == lineage.name]
    last = min(in_rows, default=MOST_DELTAS)
    return [step for step in lineage.steps() if step.sequence <= last]
