"""Follow the release files of models: serve the versions that they name, and switch as they change."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from serving.bundle.release import Release, read_release, release_path
from serving.bundle.signature import TrustedKeys
from serving.errors import BundleError, ServerUnavailable, ServingError
from serving.log import LogOnce
from serving.model.config_file import Pins
from serving.server.running_server import Server
from serving.server.versions import switch

_PERIOD_S = 1.0
_LOAD_TIMEOUT_S = 600.0
# Longest pause, in seconds, before a release that cannot be loaded is tried again. The first is _PERIOD_S, and it
# doubles each time.
_LONGEST_PAUSE_S = 60.0


# Seconds until a refused release is read again: the file and its signature may just be changing.
_SETTLED_S = 1.0


class ReleaseFile:
    """The release file of one model. A release that is older than one that was read before is refused.

    Args:
        model: its folder in the repository, not in a private folder.
        keys: a PEM file of public keys, one of which must have signed the release; None if no signature is needed.

    Attributes:
        model: the model's name.
        newest: the newest release that was read, or None.
    """

    def __init__(self, model: Path, keys: Path | None) -> None:
        self.model = model.name
        self.newest: Release | None = None
        self._folder, self._keys = model, keys

    def read(self) -> None:
        """Read the file, and set `newest`.

        Raises:
            BundleError: it cannot be read, is gone, is not signed, or is older than one that was read before.
            ConfigurationError: the keys cannot be read.
        """
        try:
            self._read()
        except BundleError:
            time.sleep(_SETTLED_S)
            self._read()

    def _read(self) -> None:
        trusted = None if self._keys is None else TrustedKeys.read(self._keys)
        release, before = read_release(self._folder, trusted), self.newest
        if before is not None and release != before:
            path = release_path(self._folder)
            if release is None:
                raise BundleError(f"{path}: is gone: release again, `tbe-export release`")
            if release.sequence <= before.sequence:
                raise BundleError(
                    f"{path}: expected a sequence above {before.sequence}, got {release.sequence}: it is older than "
                    "the present one, somebody put it back: release again, `tbe-export release`"
                )
        self.newest = release


def read_releases(repository: Path, models: Iterable[str], keys: Path | None) -> tuple[ReleaseFile, ...]:
    """The release files of `models`, which were read once.

    Raises:
        BundleError: one cannot be read, or is not signed.
        ConfigurationError: the keys cannot be read.
    """
    files = tuple(ReleaseFile(repository.absolute() / model, keys) for model in models)
    for file in files:
        file.read()
    return files


def released_versions(files: Iterable[ReleaseFile]) -> Pins:
    """The versions that releases name, by model. Models without a release are left out."""
    return {file.model: file.newest.versions for file in files if file.newest is not None}


class ReleaseFollower:
    """Reads release files on its own thread, and loads the versions that they name.

    Args:
        server: a running server. It serves the versions of the releases that `files` has read.
        files: the release files of its models.
        unload_after_s: how long older versions continue to serve requests that name them, in seconds.
    """

    def __init__(self, server: Server, files: Sequence[ReleaseFile], unload_after_s: float) -> None:
        self._server = server
        self._ended = threading.Event()
        self._followed = [_Followed(file, unload_after_s, self._tell) for file in files]
        released = released_versions(files)
        pinned = {model: versions for model, versions in server.run_file.pinned.items() if model not in released}
        server.run_file_writer.update(pinned=pinned, released=released)
        server.health.release_problems = {file.model: None for file in files}

    def start(self) -> None:
        """Begin to follow."""
        threading.Thread(target=self._run, name="release follower", daemon=True).start()

    def end(self) -> None:
        """Stop following. It does not wait for a load that has begun."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            for followed in self._followed:
                followed.follow(self._server)
                self._server.health.release_problems[followed.model] = followed.problem

    def _tell(self, level: int, event: str, model: str, line: str, release: Release | None = None) -> None:
        if not self._ended.is_set():  # a server that stops loads nothing
            version = None if release is None else max(release.versions)
            about = {"event": event, "model": model, "version": version}
            self._server.log.log(level, "model %r: %s", model, line, extra=about)


class _Followed:
    """A model that follows its release file."""

    def __init__(self, file: ReleaseFile, unload_after_s: float, tell: Callable[..., None]) -> None:
        self._file = file
        self.model = file.model
        self._unload_after_s = unload_after_s
        self._present = self._tried = file.newest
        self._unload_at: float | None = None
        self._try_at, self._pause_s = 0.0, _PERIOD_S
        self._tell = tell
        self._say_of_file = LogOnce(partial(tell, logging.WARNING, "release_refused", file.model))
        self._say_of_loading = LogOnce(partial(tell, logging.ERROR, "release_failed", file.model))

    @property
    def problem(self) -> str | None:
        """Why the release is not served, or None if it is served or unknown."""
        return self._say_of_file.problem or self._say_of_loading.problem

    def follow(self, server: Server) -> None:
        """Read the release file. Load or unload versions that are due."""
        try:
            self._file.read()
        except (ServingError, OSError) as error:
            self._say_of_file(f"release refused; {_listed(self._present)} continues: {error}")
        else:
            self._say_of_file(None)
        release, now = self._file.newest, time.monotonic()
        if release != self._tried:
            self._tried, self._try_at, self._pause_s = release, now, _PERIOD_S
        try:
            with server.loading[self._file.model]:
                if release is not None and now >= self._try_at and self._is_due(server, release):
                    self._load(server, release)
                elif self._present is not None and self._unload_at is not None and now >= self._unload_at:
                    self._unload(server, self._present)
        except ServerUnavailable:
            pass  # tritonserver is being started again
        except (ServingError, OSError) as error:
            self._try_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._say_of_loading(f"release cannot be served; {_listed(self._present)} continues: {error}")

    def _is_due(self, server: Server, release: Release) -> bool:
        """Whether the served versions differ from the release, as after a restart of tritonserver."""
        if release != self._present:
            return True
        ready = server.control(_LOAD_TIMEOUT_S).ready(self._file.model)
        return self._unload_at is None and bool(ready) and {*ready} != {*release.versions}

    def _load(self, server: Server, release: Release) -> None:
        """Load the versions of the release.

        The newest loaded version answers requests that name no version. So versions older than the release may
        continue to serve for a while, but after a roll-back, newer versions are unloaded as soon as the release
        serves.
        """
        control = server.control(_LOAD_TIMEOUT_S)
        before = control.ready(self._file.model)
        if not before:
            return  # its process died. It is being loaded again as it was
        older = [version for version in before if version < max(release.versions) and version not in release.versions]
        switch(
            control,
            self._file.model,
            release.versions,
            serving_on=older,
            private=server.private,
            repository=server.repository,
            hosts=server.run_file.hosts.get(self._file.model),
        )
        self._present = release
        self._unload_at = time.monotonic() + self._unload_after_s if older else None
        self._say_of_loading(None)
        server.run_file_writer.update(released={**server.run_file.released, self._file.model: release.versions})
        until = f"; {_numbers(older)} is unloaded in {self._unload_after_s:g} s" if older else ""
        message = f"serves {_listed(release)}, as released{until}"
        self._tell(logging.INFO, "released", self._file.model, message, release)

    def _unload(self, server: Server, present: Release) -> None:
        """Unload the older versions beside the present release."""
        control = server.control(_LOAD_TIMEOUT_S)
        if not control.ready(self._file.model):
            return
        hosts = server.run_file.hosts.get(self._file.model)
        switch(control, self._file.model, present.versions, repository=server.repository, hosts=hosts)
        self._unload_at = None


def _listed(release: Release | None) -> str:
    return "what config.pbtxt says" if release is None else f"version {_numbers(release.versions)}"


def _numbers(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))
