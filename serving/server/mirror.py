"""A model repository in a folder that follows a repository in a store."""

import logging
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from serving.bundle.load import remove_version, versions
from serving.bundle.manifest import MANIFEST
from serving.bundle.release import release_path
from serving.bundle.signature import signature_of
from serving.delta_store import DeltaStore, cache_of, store_of
from serving.errors import BundleError, ConfigurationError, ServerUnavailable, ServingError
from serving.files import is_url, read_file, replacing
from serving.log import LogOnce
from serving.model.config_file import CONFIG, Pins, read_config
from serving.server.health_state import HealthState
from serving.server.versions import configured_versions
from serving.store import Progress, Store, versions_in


class Mirror:
    """A repository in a folder that holds the versions to serve of a repository in a store.

    Args:
        store: the repository in the store.
        repository: the folder; made if it is missing.
        models: the models to pull. None: all models that the store has at each pull.
        pins: versions to serve, by model.
        follow: whether to pull the versions of releases instead of the versions that config.pbtxt names.
        is_exact: whether to remove versions from the folder that the store no longer has.
        deltas: the store of the deltas of live models. They are pulled before a release that names their version.
            If it is None, this mirror pulls no deltas.

    Attributes:
        repository: the folder.
        problem: why the first pull was incomplete, or None.
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
        """Pull missing versions, then the releases that name them. Does nothing if the store has not changed.

        Yields:
            The model and number of each pulled version.

        Raises:
            ConfigurationError: the store has no such model or version, or the folder cannot be used.
            BundleError: a file in the store is damaged.
            ServerUnavailable: the store cannot be reached, or refuses access.
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
                except ServingError as problem:  # it does not affect other models
                    problems.append(problem)
            if problems:
                raise problems[0]
            if not self._is_exact or self._remove_others(stored):
                self._last_names = names
        except OSError as error:
            raise ConfigurationError(f"{error.filename or self.repository}: cannot be written: {error}") from error

    def _versions_to_pull(self, model: str, stored: Sequence[int]) -> Sequence[int]:
        """The versions of a model to serve."""
        if model in self._pins:
            return self._pins[model]
        release = self._store.release(model) if self._follow else None
        return (
            configured_versions(read_config(self.repository / model), stored) if release is None else release.versions
        )

    def _remove_others(self, stored: Pins) -> bool:
        """Remove the versions and models that the store no longer has, unless a server has them open.

        Returns:
            Whether all of them were removed.
        """
        all_gone = True
        for model in [path for path in self.repository.iterdir() if path.is_dir()]:
            stored_versions = stored.get(model.name, ())
            absent = [number for number in versions(model) if number not in stored_versions]
            open_versions = [number for number in absent if not remove_version(model / str(number))]
            all_gone = all_gone and not open_versions
            if open_versions and (not stored_versions or max(open_versions) > max(stored_versions)):
                raise ConfigurationError(
                    f"{model}: {self._store.url} no longer has version {max(open_versions)}, which a server has "
                    "open: name another folder, --cache"
                )
            if not stored_versions:
                shutil.rmtree(model)
                for path in (release := release_path(model), signature_of(release)):
                    path.unlink(missing_ok=True)
        return all_gone

    def keep(self, log: logging.Logger, every_s: float, health_states: Sequence[HealthState] = ()) -> NoReturn:
        """Pull repeatedly. A problem is logged once until it changes.

        Args:
            log: gets pulled versions and problems.
            every_s: seconds between two pulls.
            health_states: the health of each server that serves the folder, which exports when the store was last
                read.
        """
        log_problem = LogOnce(
            partial(log.warning, "cannot pull: %s", extra={"event": "pull_failed"}),
            None if self.problem is None else str(self.problem),
        )
        is_read = True
        while True:
            for health in health_states if is_read else ():
                health.note_store_read(self._store.url, time.time())
            time.sleep(every_s)
            is_read = False
            try:
                for model, version in self.pull():
                    about = {"event": "pulled", "model": model, "version": version}
                    log.info("model %r: pulled version %d", model, version, extra=about)
                log_problem(None)
                is_read = True
            except ServingError as error:
                log_problem(str(error))
            except Exception as error:
                log_problem("".join(traceback.format_exception(error)))


def mirror_of(
    source: str,
    cache: Path | None,
    pins: Pins,
    *,
    every_s: float | None,
    follow: bool,
    deltas: str | None,
    progress: Progress = lambda *_: None,
) -> Mirror | None:
    """Make a mirror of a repository in a store, and pull once.

    If the store does not answer or has a damaged file, the versions of earlier pulls are served, and `problem` of the
    mirror says why. This needs at least one complete version of each model, and all versions of `pins`.

    Args:
        source: a folder or a URL.
        cache: the folder that versions are pulled into. None stands for a folder of the URL in ~/.cache/tbe-serving.
        pins, follow: as for `Mirror`.
        every_s: seconds between two pulls, or None for the default.
        deltas: the folder of the deltas of live models, or its URL.
        progress: gets the number of bytes pulled.

    Returns:
        None if `source` is a folder.

    Raises:
        ConfigurationError: `source` is a folder and an option for URLs was set, or the cache belongs to another URL.
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
        for _ in mirror.pull(progress):
            pass
    except (ServerUnavailable, BundleError) as problem:
        begun = {path.parent.name for path in repository.glob(f"*/{CONFIG}")}
        pulled = {(path.parent.parent.name, path.parent.name) for path in repository.glob(f"*/*/{MANIFEST}")}
        pinned = {(model, str(version)) for model, numbers in pins.items() for version in numbers}
        if not begun or begun != {model for model, _ in pulled} or not pinned <= pulled:
            raise
        mirror.problem = problem
    return mirror


def _expect_cache_of(url: str, repository: Path) -> None:
    """Refuse a folder with other content, or of another URL: files that the store lacks would be removed."""
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
        got = f"a folder of {filled_from}" if filled_from else "a folder with other content"
        raise ConfigurationError(
            f"--cache {repository}: expected an empty folder, or a folder that `tbe-serve run {url}` filled, got "
            f"{got}: files that the store lacks would be removed"
        )
