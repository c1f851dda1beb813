"""Commands where keys are trusted, and a server that runs while its repository is changed."""

import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from export import export_model
from serving.__main__ import app
from serving.client import LookupClient
from serving.errors import ServingError
from tests.support.attackers import (
    CHANGED_CONFIG,
    EXACT,
    Target,
    add_code,
    answers,
    expected_files,
    flip,
    served_files,
    to_config,
    unsigned_version,
    warm_up,
)
from tests.support.models import SUM, collection
from tests.support.servers import FREE_PORTS, Running, running, stubs, tbe_serve, wait_for_answer


def command(*arguments: str | Path) -> Result:
    """A command, in this process."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def load(server: Running, *more: str) -> Result:
    return command("load", "m", "--url", server.grpc, *more)


@pytest.mark.promise("A model that is reloaded after its repository was changed is the signed one")
def test_a_server_with_a_changed_repository_recovers_the_signed_files(target: Target) -> None:
    with running(target.repository, "--trusted-keys", str(target.trusted)) as server:
        add_code(target, target.newest)
        (target.newest / "model.py").write_text(target.code)
        flip(target.newest / "weights.0.bin")
        to_config("version_policy { all {} }\n")(target)
        for stub in stubs(server.triton, "m"):
            stub.kill()
        with LookupClient(server.grpc, "m", 60) as client:
            wait_for_answer(client)
        assert answers(server.grpc, seed=2) == 2
        refused = load(server)
        assert (refused.exit_code, refused.stdout) == (1, "m: still serves version 2\n")
        assert "config.sig: expected a signature" in refused.stderr


@pytest.mark.long
def test_a_running_server_loads_only_signed_versions_and_settings(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    options = ("--trusted-keys", str(target.trusted), "--private-folder", str(folder), "--min-version", "m=2")
    with running(target.repository, *options) as server:
        unsigned_version(target)
        refused = load(server)
        assert (refused.exit_code, refused.stdout) == (1, "m: still serves version 2\n")
        assert "m/3/manifest.sig: cannot be read" in refused.stderr
        assert "or newer, as --min-version says, got 1" in load(server, "--version", "1").stderr
        signed = command("configure", target.model, "--instances", "2", "--signing-key", target.key)
        assert signed.exit_code == 0, signed.output
        export_model(collection(SUM, seed=4), target.repository, "m", EXACT, signing_key=target.key)
        assert load(server).stdout == "m: version 2 → 4\n"
        assert answers(server.grpc, seed=4) == 4
        wait_for_stubs(server.triton, 2)
        # Version 2 is not what it was, in the repository; what is served is ours.
        flip(target.newest / "weights.0.bin")
        assert load(server, "--version", "2").stdout == "m: version 4 → 2\n"
        assert answers(server.grpc, seed=2) == 2
        assert load(server).stdout == "m: version 2 → 4\n"
    assert list(folder.iterdir()) == []


def wait_for_stubs(server: psutil.Process, count: int) -> None:
    """Until this many processes answer for `m`: those of a version that was served before may not have ended."""
    deadline = time.monotonic() + 60
    while len(stubs(server, "m")) != count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.promise("What is refused is refused before tritonserver starts")
def test_the_command_refuses_before_tritonserver_starts(target: Target) -> None:
    unsigned_version(target)
    done = tbe_serve("run", str(target.repository), *FREE_PORTS, "--trusted-keys", str(target.trusted))
    assert done.returncode == 1
    assert "m/3/manifest.sig: cannot be read: No such file or directory: only what a key of" in done.stderr


def test_the_oldest_version_of_an_unserved_model_is_refused(target: Target) -> None:
    """A mistyped name would leave the model without its bound."""
    options = ("--trusted-keys", str(target.trusted), "--min-version", "movie=3", "--min-version", "m=1")
    done = tbe_serve("run", str(target.repository), *FREE_PORTS, *options)
    assert done.returncode == 1
    assert done.stderr == "tbe-serve: --min-version movie: expected one of the models that are served, m, other\n"


def test_a_signed_warm_up_and_a_signed_version_are_taken(target: Target) -> None:
    warm_up(target)
    signed = command("configure", target.model, "--version", "1", "--signing-key", target.key)
    assert signed.exit_code == 0, signed.output
    assert served_files(target).keys() == expected_files(1) | {"m/warm_up.jsonl"}
    changed = command("configure", target.model, "--version", "2").stdout
    assert "its signature is now invalid: servers with --trusted-keys refuse it until you sign it" in changed
    with pytest.raises(ServingError, match=CHANGED_CONFIG):
        served_files(target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-version", "3"), "require --trusted-keys"),
        (("--private-folder", "/tmp"), "require --trusted-keys"),
        (("--trusted-weights", "in-place"), "require --trusted-keys"),
        (("--trusted-keys", "t.pem", "--min-version", "m=x"), "--min-version m=x: expected"),
        (("--trusted-keys", "t.pem", "--min-version", "m=-1"), "--min-version m=-1: expected"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[str, ...], message: str) -> None:
    done = command("run", "r", *options)
    assert done.exit_code == 1
    assert message in done.stderr
