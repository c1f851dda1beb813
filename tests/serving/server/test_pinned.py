"""Versions that are pinned at the start: exactly those are served, whatever happens."""

import re
from pathlib import Path

import pytest

from serving.client import LookupClient
from serving.errors import ServingError, TritonserverFailed
from serving.server import run_server
from serving.server.private_folder import Trust
from tests.support.attackers import Target, answers, flip, served_files
from tests.support.long_cases import one_in
from tests.support.servers import FREE, read_only, refused_run, running, stubs, tbe_serve, wait_for_answer


@pytest.mark.promise(
    "A pinned version is served again after its process or its tritonserver died, also from a read-only repository"
)
def test_a_pinned_version_is_served_after_crashes_of_model_and_server(target: Target) -> None:
    """From a repository that nobody may write to."""
    with running(target.repository, "--serve", "m=1", within=read_only(target.repository)) as server:
        said = [answers(server.grpc, seed=1)]
        with LookupClient(server.grpc, "m", 30) as client:
            for victim in (stubs(server.triton, "m")[0], server.triton):
                victim.kill()
                victim.wait(10)
                wait_for_answer(client)
                said.append(answers(server.grpc, seed=1))
        assert said == [1, 1, 1]
        done = tbe_serve("load", "m", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (1, "")
        assert "m: this server's --serve pins it to 1: name a version" in done.stderr
        assert tbe_serve("load", "m", "--version", "2", "--url", server.grpc).stdout == "m: version 1 → 2\n"


def test_two_pinned_versions_serve_side_by_side(target: Target, tmp_path: Path) -> None:
    with run_server(target.repository, FREE, pins={"m": (1, 2)}, log=tmp_path / "log") as server:
        assert [(model.name, model.versions) for model in server.models] == [("m", (1, 2)), ("other", (1,))]
        assert answers(server.grpc, seed=2) == 2
        assert server.control(30).load("m", (1,)) == (1,)
        assert answers(server.grpc, seed=1) == 1


@pytest.mark.long
def test_a_signed_version_is_pinned(target: Target, tmp_path: Path) -> None:
    """Of the signed versions the pinned ones alone are copied; the repository may be gone when one dies."""
    trust = Trust(keys=target.trusted)
    with run_server(target.repository, FREE, pins={"m": (1,)}, trust=trust, log=tmp_path / "log") as server:
        assert answers(server.grpc, seed=1) == 1
        assert server.private is not None
        assert {path.name for path in (server.private.repository / "m").iterdir() if path.is_dir()} == {"1"}


def test_a_pin_below_min_version_is_refused(target: Target) -> None:
    assert "m/1/manifest.json" in served_files(target, pins={"m": (1,)}, min_versions={"m": 1})
    with pytest.raises(ServingError, match=r"m: expected version 2 or newer, as --min-version says, got 1"):
        served_files(target, pins={"m": (2, 1)}, min_versions={"m": 2})


@pytest.mark.parametrize(
    ("pin", "message"),
    one_in(
        3,
        [
            ("m=9", r"/r/m: expected one of versions \[2, 1\], got 9"),
            ("m=1,9", r"/r/m: expected one of versions \[2, 1\], got 9"),
            ("n=1", r"/r: expected one of the models m, other, got 'n'"),
            ("1", r"--serve 1: expected MODEL=N\[,N\] with version numbers"),
            ("m=newest", r"--serve m=newest: expected MODEL=N\[,N\] with version numbers"),
            ("m=", r"--serve m=: expected MODEL=N\[,N\] with version numbers"),
        ],
    ),
)
def test_an_invalid_pin_is_refused_by_name(target: Target, pin: str, message: str) -> None:
    done = refused_run(str(target.repository), "--serve", pin)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()  # no tritonserver was started
    assert re.search(message, line)


@pytest.mark.long
def test_a_pinned_version_that_cannot_be_loaded_is_named(target: Target, tmp_path: Path) -> None:
    flip(target.model / "1" / "weights.0.bin")
    with (
        pytest.raises(TritonserverFailed, match=r"^m: cannot serve 1: .*weights\.0\.bin: expected SHA-256"),
        run_server(target.repository, FREE, pins={"m": (1,)}, log=tmp_path / "log"),
    ):
        pass
