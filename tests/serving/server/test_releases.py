"""Releases that servers follow: forward and back under load, broken, replayed, and after everything died."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.bundle.release import release_path
from serving.client import LookupClient
from serving.server import Control
from serving.server.run_file import find_run_file
from tests.serving.server.test_versions import Seen, ask_until, broken_version, export_version
from tests.support.attackers import Target, answers, flip
from tests.support.commands import tbe_export
from tests.support.long_cases import one_in
from tests.support.servers import Running, page, read_only, refused_run, running, stubs, tbe_serve, wait_for_answer


def release(model: Path, *versions: int, key: Path | None = None) -> None:
    signed = () if key is None else ("--signing-key", str(key))
    done = tbe_export("release", str(model), *map(str, versions), *signed)
    assert done.exit_code == 0, done.output


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def control_of(server: Running) -> Control:
    run = find_run_file(server.grpc)
    assert run is not None
    return Control(address=run.control, key=run.key, timeout_s=30)


def wait_for_versions(server: Running, *versions: int) -> None:
    control = control_of(server)
    wait_until(lambda: control.ready("m") == versions)


class Said:
    """What a server says of its models, while it runs."""

    def __init__(self, server: Running) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(server,), daemon=True)
        self._thread.start()

    def wait_for(self, words: str) -> None:
        wait_until(lambda: bool(self.of(words)))

    def of(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]

    def _read(self, server: Running) -> None:
        assert server.process.stderr is not None
        for line in server.process.stderr:
            if " tbe-serve " in line and ": model '" in line and " switched: " not in line:
                self.lines.append(line)


@pytest.mark.promise("A release is followed forward and back under load without a failed or wrong answer")
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_release_is_followed_forward_and_back_under_load(tmp_path: Path, rounds: int) -> None:
    repository, model = tmp_path / "r", tmp_path / "r" / "m"
    bundles = {version: export_version(repository, version) for version in (1, 2)}
    release(model, 1)
    answers, stopped = Seen(), threading.Event()
    with running(repository, "--follow", "--unload-after-s", "0.5", within=read_only(repository)) as server:
        said = Said(server)
        assert control_of(server).ready("m") == (1,)
        askers = [
            threading.Thread(target=ask_until, args=(stopped, server.grpc, bundles, seed, answers))
            for seed in range(3)
        ]
        for asker in askers:
            asker.start()
        try:
            answers.wait_for_clients(len(askers))
            for version in (2, 1) * rounds:
                release(model, version)
                wait_for_versions(server, version)
                answers.wait_for(version)
        finally:
            stopped.set()
            for asker in askers:
                asker.join()
        assert (answers.failed, answers.wrong) == ([], [])
        assert set(answers.versions) == {1, 2}
        # What has served beside another since comes back alone.
        with LookupClient(server.grpc, "m", 30) as client:
            server.triton.kill()
            wait_for_answer(client)
            stubs(server.triton, "m")[0].kill()
            said.wait_for("serves again after")
            wait_for_versions(server, 1)
            wait_for_answer(client)
            assert client.lookup({"x": [[1]]}).version == 1
            assert control_of(server).ready("m") == (1,)


@pytest.mark.promise("A released version that cannot be loaded is reported once, and the serving version continues")
def test_an_unloadable_version_leaves_the_present_one_and_is_logged_once(tmp_path: Path) -> None:
    repository, model = tmp_path / "r", tmp_path / "r" / "m"
    export_version(repository, 1)
    broken_version(repository)
    release(model, 1)
    with running(repository, "--follow", "--unload-after-s", "0") as server:
        said = Said(server)
        assert 'tbe_release_failed{model="m"} 0' in page(server, "/metrics")
        refused = tbe_export("release", str(model), "2")
        assert refused.exit_code == 1
        assert f"{model}/2/weights.0.bin: expected 800 bytes" in refused.stderr
        assert tbe_export("release", str(model), "2", "--no-verify").exit_code == 0
        problem = f"release cannot be served; version 1 continues: {model}/2/weights.0.bin: expected"
        said.wait_for(problem)
        wait_until(lambda: 'tbe_release_failed{model="m"} 1' in page(server, "/metrics"))
        assert f"ready\nrelease: model 'm': {problem}" in page(server, "/readyz?verbose")
        done = tbe_serve("load", "m", "--url", server.grpc)
        assert done.returncode == 1
        assert "m: this server follows its release (--follow): use `tbe-export release` instead" in done.stderr
        with LookupClient(server.grpc, "m", 30) as client:
            assert client.lookup({"x": [[1]]}).version == 1
        export_version(repository, 3)
        release(model, 3)
        wait_for_versions(server, 3)
        said.wait_for("serves version 3")
        assert len(said.lines) == 2, said.lines
        wait_until(lambda: page(server, "/readyz?verbose") == "ready\n")
        assert 'tbe_release_failed{model="m"} 0' in page(server, "/metrics")
    # A server that is started anew serves what the release says, and nothing else.
    export_version(repository, 4)
    with running(repository, "--follow") as server:
        assert control_of(server).ready("m") == (3,)
    shutil.rmtree(model / "3")
    done = refused_run(str(repository), "--follow")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{model}: expected one of versions [4, 2, 1], got 3" in done.stderr


@pytest.mark.promise("A running server accepts only newer signed releases")
def test_only_a_newer_signed_release_is_followed(target: Target) -> None:
    def put(files: dict[Path, bytes]) -> None:
        for path, content in files.items():
            path.write_bytes(content)

    def copied_files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in target.repository.glob("m.release.*")}

    release(target.model, 1, key=target.key)
    first = copied_files()
    signed = ("--follow", "--trusted-keys", str(target.trusted), "--min-version", "1")
    with running(target.repository, *signed, "--unload-after-s", "1000") as server:
        said = Said(server)
        assert answers(server.grpc, seed=1) == 1
        release(target.model, 2, key=target.key)
        wait_for_versions(server, 1, 2)  # 1 serves on, for callers that name it
        assert answers(server.grpc, seed=2) == 2
        second = copied_files()

        put(first)
        said.wait_for("release refused; version 2 continues: ")
        assert len(said.of("somebody put it back")) == 1
        put(second)
        release(target.model, 1)  # not signed
        said.wait_for("over m.release.json of model 'm', got another")
        (target.repository / "m.release.sig").unlink()
        said.wait_for("only what a key of")
        release_path(target.model).unlink()
        said.wait_for("m.release.json: is gone")
        assert answers(server.grpc, seed=2) == 2

        release(target.model, 1, key=target.key)
        wait_for_versions(server, 1)  # callers that name none are to get 1 now
        assert answers(server.grpc, seed=1) == 1
        said.wait_for("serves version 1, as released")
        assert [len(said.of(words)) for words in ("release refused", "serves version")] == [4, 2]
    flip(release_path(target.model).with_suffix(".sig"))
    done = refused_run(str(target.repository), *signed)
    assert (done.returncode, done.stdout) == (1, "")
    assert "m.release.sig: expected a signature by a key of" in done.stderr


@pytest.mark.long
def test_a_pin_overrides_a_release_and_both_the_configured_version(target: Target) -> None:
    assert tbe_serve("configure", str(target.model), "--version", "1").returncode == 0
    release(target.model, 2)
    with running(target.repository, "--follow") as server:
        assert control_of(server).ready("m") == (2,)
    with running(target.repository, "--follow", "--serve", "m=1") as server:
        assert control_of(server).ready("m") == (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    one_in(
        3,
        [
            (("--unload-after-s", "3"), "--unload-after-s: requires --follow"),
            (("--follow", "--unload-after-s", "nan"), "--unload-after-s: expected 0 to 1000000, got nan"),
            (("--follow", "--unload-after-s", "-1"), "--unload-after-s: expected 0 to 1000000, got -1"),
        ],
    ),
)
def test_contradictory_options_are_named(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = refused_run(str(tmp_path), *options)
    assert done.returncode == 1
    assert message in done.stderr
