"""`tbe-serve status`."""

import json
import time
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from export import export_model
from serving.client import LookupClient
from serving.commands.status import status_tables
from serving.lookup.instruction_set import instruction_set
from serving.lookup.program import load_fbgemm
from serving.server.run_file import find_run_file
from serving.server.status import Kernels, ModelStatus, Programs, Status, VersionStatus
from tests.support.attackers import flip
from tests.support.models import SUM, collection
from tests.support.servers import (
    Running,
    replace_model_py,
    running,
    stubs,
    tbe_serve,
    wait_for_answer,
    wait_for_stubs,
)

SLOW_KERNELS = """
import serving.backend.triton as triton
from serving.backend import TritonPythonModel

triton.instruction_set, triton.slow_kernels = lambda: "anyarch", lambda _: "slow"
"""


def test_status_shows_a_local_server_in_full_and_the_versions_of_a_fleet(tmp_path: Path) -> None:
    for seed in (1, 2):
        bundle = export_model(collection(SUM, seed=seed), tmp_path / "r", "m")
    assert tbe_serve("configure", str(bundle.parent), "--instances", "2", "--max-busy-ms", "300").returncode == 0
    with running(tmp_path / "r", "--serve", "m=2") as one, running(tmp_path / "r", "--serve", "m=1") as two:
        for victim in stubs(
            one.triton, "m"
        ):  # one that lives would stay where Triton waits for a request of the other
            victim.kill()
        with LookupClient(one.grpc, "m", 30) as client:
            wait_until_recovered(one.grpc)
            wait_for_answer(client)
        wait_for_stubs(one.triton, "m", 2)

        done = tbe_serve("status", one.grpc, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        (model,) = said["models"]
        (version,) = model["versions"]
        weights = (bundle / "weights.0.bin").stat().st_size
        assert (said["address"], said["process"], said["triton"]) == (one.grpc, one.triton.pid, "2.51.0")
        assert (model["name"], model["chosen_by"]) == ("m", "pin")
        assert (version["version"], version["state"], version["reason"]) == (2, "READY", "")
        assert {instance["process"] for instance in version["instances"]} == {
            stub.pid for stub in stubs(one.triton, "m")
        }
        assert version["weights_bytes"] == weights
        assert 0 <= version["cached_bytes"] <= weights
        load_fbgemm()
        assert version["kernels"] == {"instruction_set": instruction_set(), "are_slow": False}
        assert version["programs"] == [{"lookup": "torchscript", "scores": ""}]
        for instance in version["instances"]:
            memory = instance["memory"]
            assert weights <= memory["mapped"] < memory["share"] < memory["resident"]
        assert (model["settings"]["instances"], model["settings"]["max_busy_ms"]) == (2, 300)
        assert said["recoveries"] == 1
        assert (said["last_recovery"]["model"], said["last_recovery"]["why"]) == ("m", "a backend process died")

        table = tbe_serve("status", one.grpc)
        assert table.returncode == 0
        for words in (
            one.grpc,
            "--serve",
            "max-busy-ms",
            "1; the last at",
            "tritonserver",
            "page cache",
            instruction_set(),
            "torchscript",
        ):
            assert words in table.stdout
        assert "reference kernels" not in table.stdout
        assert "merged-requests" not in table.stdout  # it is at its default

        done = tbe_serve("status", "--fleet", f"{one.grpc},{two.grpc}", "--json")
        assert done.returncode == 1
        differ = f"m: versions differ: 1 on {two.grpc}; 2 on {one.grpc}"
        assert json.loads(done.stdout) == {
            "servers": [
                {"address": one.grpc, "triton": "2.51.0", "models": {"m": [2]}, "problem": None},
                {"address": two.grpc, "triton": "2.51.0", "models": {"m": [1]}, "problem": None},
            ],
            "problems": [differ],
        }
        assert done.stderr == f"tbe-serve: {differ}\n"
        done = tbe_serve("status", "--fleet", one.grpc, "--fleet", one.grpc)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split() for line in done.stdout.splitlines()][1] == [one.grpc, "2.51.0", "m", "2", "ready"]


def test_status_shows_what_a_load_chose_and_why_a_version_failed(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    for seed in (1, 2):
        export_model(collection(SUM, seed=seed), repository, "m")

    def chosen(server: Running) -> str:
        (model,) = json.loads(tbe_serve("status", server.grpc, "--json").stdout)["models"]
        return str(model["chosen_by"])

    with running(repository) as server:
        assert chosen(server) == "config"
        assert tbe_serve("load", "m", "--version", "1", "--url", server.grpc).returncode == 0
        assert chosen(server) == "load"
        assert "tbe-serve load" in tbe_serve("status", server.grpc).stdout
        assert tbe_serve("load", "m", "--url", server.grpc).returncode == 0
        assert chosen(server) == "config"
        flip(export_model(collection(SUM, seed=3), repository, "m") / "weights.0.bin")  # its process finds out
        assert tbe_serve("load", "m", "--version", "3", "--url", server.grpc).returncode == 1
        assert chosen(server) == "config"  # as before: 2 serves on
        said = tbe_serve("status", server.grpc).stdout
    assert "m 3  " in said
    assert "At:" not in said


def shown(version: VersionStatus) -> str:
    """What `tbe-serve status` prints of a version of the model `movies`."""
    model = ModelStatus(name="movies", chosen_by="config", versions=(version,), settings={})
    status = Status(
        address="127.0.0.1:8001",
        triton="2.51.0",
        process=1,
        memory=None,
        models=(model,),
        recoveries=0,
        last_recovery=None,
    )
    console = Console(width=100, file=StringIO(), record=True)
    for table in status_tables(status):
        console.print(table)
    return console.export_text()


def test_the_formats_of_programs_are_shown() -> None:
    """Both formats, if one process could not load the native code, for example on a full disk."""
    native, torchscript = Programs("plain", "aotinductor"), Programs("plain", "torchscript")
    assert "movies  2        avx2     plain    torchscript" in shown(serving_version("avx2", torchscript))
    assert "plain    aotinductor, torchscript" in shown(serving_version("avx2", torchscript, native))
    assert "lookups" not in shown(msgspec.structs.replace(serving_version("avx2"), kernels=None))


def serving_version(instruction_set: str, *programs: Programs) -> VersionStatus:
    return VersionStatus(
        version=2,
        state="READY",
        reason="",
        instances=(),
        weights_bytes=None,
        cached_bytes=None,
        kernels=Kernels(instruction_set, are_slow=False),
        programs=programs,
    )


def test_status_shows_slow_kernels(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    replace_model_py(bundle, SLOW_KERNELS)
    with running(tmp_path / "r") as server:
        (model,) = json.loads(tbe_serve("status", server.grpc, "--json").stdout)["models"]
        assert model["versions"][0]["kernels"] == {"instruction_set": "anyarch", "are_slow": True}
        assert "reference kernels" in tbe_serve("status", server.grpc).stdout


def wait_until_recovered(grpc: str) -> None:
    deadline = time.monotonic() + 60
    while (run := find_run_file(grpc)) is None or not run.recoveries:
        assert time.monotonic() < deadline, "its process was not missed"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1:1",), "127.0.0.1:1: does not answer: "),
        (("--fleet", "a"), "a: expected host:port, such as 127.0.0.1:8001"),
        (("--fleet", "a:1,"), "'': expected host:port, such as 127.0.0.1:8001"),
        (
            ("--fleet", "a:1", "--metadata", "/proc/self/comm"),
            "--metadata /proc/self/comm: expected a JSON object of strings",
        ),
        (("--fleet", "a:1", "--metadata", "/nowhere"), "--metadata /nowhere: No such file or directory"),
    ],
)
def test_a_failed_status_call_says_why(arguments: tuple[str, ...], message: str) -> None:
    done = tbe_serve("status", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
