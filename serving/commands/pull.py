"""`tbe-serve pull`: bring the versions to serve from a repository in a store into a folder, once or in a loop."""

import logging
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from serving.bundle.load import remove_version, versions
from serving.bundle.manifest import MANIFEST
from serving.bundle.release import release_path
from serving.bundle.signature import signature_of
from serving.commands.version_options import PinsOf, takes_pins
from serving.delta_store import DeltaStore, cache_of, store_of
from serving.errors import BundleError, ConfigurationError, ServerUnavailable, ServingError
from serving.files import is_url, read_file, replacing
from serving.log import server_log
from serving.model.config_file import CONFIG, Pins, read_config
from serving.server.health_state import HealthState
from serving.server.versions import said_versions
from serving.store import Progress, Store, versions_in
from serving.terminal.app import bytes_bar, out


class Mirror:
    """A repository in a folder that has what is to be served of one in a store.

    Args:
        store: the repository in the store.
        repository: the folder; made if it is missing.
        models: its models. None: all that the store has, at each pull.
        pins: versions to serve, by model.
        follow: whether releases say what is to be served. Otherwise config.pbtxt says it.
        is_exact: whether to remove versions from the folder that the store no longer has.
        deltas: has the deltas of live models, which are brought before a release that names their version. None: they
            are brought by others.

    Attributes:
        repository: the folder.
        problem: why not all could be brought at the start. None: it was.
    """

    def __init__(
        self,
        store: Store,
        repository: Path,
        *,
        models: Sequence[str] | None = None,
        pins: Pins,
        follow: bool,
        is_exact: bool = False,
        deltas: DeltaStore | None = None,
    ) -> None:
        self.repository = repository
        self.problem: ServingError | None = None
        self._store, self._is_exact, self._deltas = store, is_exact, deltas
        self._models, self._pins, self._follow = models, pins, follow
        self._last_names: dict[str, str] | None = None

    def pull(self, progress: Progress = lambda *_: None) -> Iterator[tuple[str, int]]:
        """Bring what is missing: versions, and then the releases that name them. Nothing, if the store is as it was.

        Yields:
            The name and version of what was brought.

        Raises:
            ConfigurationError: the store has no such model or version, or the folder cannot be used.
            BundleError: a file in the store is damaged.
            ServerUnavailable: the store cannot be reached, or lets nobody read.
        """
        names = self._store.names()
        if names == self._last_names:
            return
        stored = versions_in(names)
        models = stored if self._models is None else self._models
        if missing := sorted({*models, *self._pins} - {*stored}):
            stored_names = ", ".join(stored) or "none"
            raise ConfigurationError(
                f"{self._store.url}: expected one of the models {stored_names}, got {missing[0]!r}"
            )
        if not models:
            hint = ": is it a model's? Name the repository that the model is in" if CONFIG in names else ""
            raise ConfigurationError(f"{self._store.url}: expected models made by tbe-export, found none{hint}")
        problems: list[ServingError] = []
        try:
            for model in models:
                try:
                    self._store.pull_settings(model, self.repository)
                    for version in self._versions_to_pull(model, stored[model]):
                        if self._store.pull(model, version, self.repository, progress):
                            yield model, version
                    if self._deltas is not None:
                        self._deltas.refresh_all(self.repository / model)
                    self._store.pull_release(model, self.repository)
                except ServingError as problem:  # the other models have nothing to do with it
                    problems.append(problem)
            if problems:
                raise problems[0]
            if not self._is_exact or self._remove_others(stored):
                self._last_names = names
        except OSError as error:
            raise ConfigurationError(f"{error.filename or self.repository}: cannot be written: {error}") from error

    def _versions_to_pull(self, model: str, stored: Sequence[int]) -> Sequence[int]:
        """The versions of a model that are to be served."""
        if model in self._pins:
            return self._pins[model]
        release = self._store.release(model) if self._follow else None
        return said_versions(read_config(self.repository / model), stored) if release is None else release.versions

    def _remove_others(self, stored: Pins) -> bool:
        """Remove the versions and models that the store has no longer, unless a server has them open.

        Returns:
            Whether all of them are gone.
        """
        all_gone = True
        for model in [path for path in self.repository.iterdir() if path.is_dir()]:
            there = stored.get(model.name, ())
            absent = [number for number in versions(model) if number not in there]
            open_versions = [number for number in absent if not remove_version(model / str(number))]
            all_gone = all_gone and not open_versions
            if open_versions and (not there or max(open_versions) > max(there)):
                raise ConfigurationError(
                    f"{model}: {self._store.url} no longer has version {max(open_versions)}, which a server has "
                    "open: name another folder, --cache"
                )
            if not there:
                shutil.rmtree(model)
                for path in (release := release_path(model), signature_of(release)):
                    path.unlink(missing_ok=True)
        return all_gone

    def keep(self, log: logging.Logger, every_s: float, health_states: Sequence[HealthState] = ()) -> NoReturn:
        """Pull again and again. A problem is logged once, as long as it stays the same.

        Args:
            log: takes what was brought, and problems.
            every_s: seconds between two looks at the store.
            health_states: of the servers that serve what is fetched. They show when the store was last read.
        """
        problem = "" if self.problem is None else str(self.problem)
        is_read = True
        while True:
            for health in health_states if is_read else ():
                health.note_store_read(self._store.url, time.time())
            time.sleep(every_s)
            is_read = False
            try:
                for model, version in self.pull():
                    about = {"event": "pulled", "model": model, "version": version}
                    log.info("model %r: version %d is here", model, version, extra=about)
                problem, is_read = "", True
            except Exception as error:
                said = str(error) if isinstance(error, ServingError) else "".join(traceback.format_exception(error))
                if said != problem:
                    log.warning("nothing new can be brought: %s", said, extra={"event": "pull_failed"})
                problem = said


def mirror_of(
    source: str, cache: Path | None, pins: Pins, *, every_s: float | None, follow: bool, deltas: str | None
) -> Mirror | None:
    """What brings here what a store's repository says to serve. It has done so once. None: the place is a folder.

    If the store does not answer, or has something that is damaged, what was brought before is served, and the mirror
    has the `problem`; unless there is nothing of a model that was begun, or a version of `pins` is missing.

    Args:
        source: a folder or a URL.
        cache: the folder that versions are brought into. None: one for the URL in ~/.cache/tbe-serving.
        pins, follow: as `Mirror`.
        every_s: seconds between two looks at the store, if they were said.
        deltas: the folder of the deltas of live models, or its URL.

    Raises:
        ConfigurationError: the place is a folder, and what is for URLs was given; or the cache is not the URL's.
        ServingError: as `Mirror.pull`.
    """
    if not is_url(source):
        if cache is not None or every_s is not None:
            raise ConfigurationError(f"--cache, --every-s: require the URL of a repository, got {source!r}")
        return None
    repository = cache or cache_of(source) / "repository"
    mirror = Mirror(Store(source), repository, pins=pins, follow=follow, is_exact=True, deltas=store_of(deltas))
    _expect_cache_of(source.rstrip("/"), mirror.repository)
    try:
        with bytes_bar("bringing") as progress:
            for _ in mirror.pull(progress):
                pass
    except (ServerUnavailable, BundleError) as problem:
        begun = {path.parent.name for path in repository.glob(f"*/{CONFIG}")}
        there = {(path.parent.parent.name, path.parent.name) for path in repository.glob(f"*/*/{MANIFEST}")}
        pinned = {(model, str(version)) for model, numbers in pins.items() for version in numbers}
        if not begun or begun != {model for model, _ in there} or not pinned <= there:
            raise
        mirror.problem = problem
    return mirror


def _expect_cache_of(url: str, repository: Path) -> None:
    """Refuse a folder that has something of its own, or of another URL: what the store has not would be removed."""
    mark = repository.parent / f".{repository.name}.pulls" / ".url"
    try:
        filled_from = read_file(mark).decode(errors="replace") if mark.exists() else None
        if filled_from is None and not (repository.is_dir() and any(repository.iterdir())):
            mark.parent.mkdir(parents=True, exist_ok=True)
            with replacing(mark) as file:
                file.write(url.encode())
            return
    except OSError as error:
        raise ConfigurationError(f"{mark}: cannot be written: {error}") from error
    if filled_from != url:
        got = f"one of {filled_from}" if filled_from else "one with something else"
        raise ConfigurationError(
            f"--cache {repository}: expected an empty folder, or one that `tbe-serve run {url}` filled, got {got}: "
            "what the store has not is removed there"
        )


@takes_pins
def pull(
    url: Annotated[str, typer.Argument(help="A repository in a store, such as s3://bucket/models.")],
    repository: Annotated[Path, typer.Argument(help="The model repository that gets it; made if it is missing.")],
    pins: PinsOf,
    model: Annotated[
        list[str] | None, typer.Option(help="This model alone; may be given again. Default: all that there are.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Bring the versions that releases say, `tbe-export release`."),
    ] = False,
    every_s: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=86_400,
            help="Go on until SIGINT or SIGTERM, with a look at the store every so many seconds.",
        ),
    ] = None,
) -> None:
    """Bring the versions to serve from a store into a repository in a folder, each compared with its digests.

    A version is there completely or not at all. What was interrupted goes on where it stopped.
    """
    mirror = Mirror(Store(url), repository, models=model or None, pins=pins(), follow=follow)
    with bytes_bar("bringing") as progress:
        for name, version in mirror.pull(progress):
            out.print(f"{repository / name / str(version)}", soft_wrap=True)
    if every_s is not None:
        mirror.keep(server_log(), every_s)
