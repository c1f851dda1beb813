"""The process that answers from a draft: it is there while rows are stored, and gone afterwards."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from export import ExportConfig, Sharding, WeightDtype, export_model
from export.config import Progress
from export.errors import ParityError
from export.parity.fresh_process import FreshProcess
from export.trained.probe_request import make_probe
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.models import collection
from tests.support.reload_process import in_this_process

pytestmark = pytest.mark.usefixtures("fresh_process")


def children(process: int) -> set[str]:
    """The processes that a process has started and not waited for."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return {child for thread in threads for child in (thread / "children").read_text().split()}


def test_the_process_starts_before_storing_rows_and_ends_with_the_export(tmp_path: Path) -> None:
    before = children(os.getpid())
    started: list[set[str]] = []

    def watch(_: Progress) -> None:
        started.append(children(os.getpid()) - before)

    export_model(collection(), tmp_path / "r", "m", progress=watch)
    assert {len(processes) for processes in started} == {1}
    assert children(os.getpid()) == before
    started.clear()
    config = ExportConfig(dtype={"*": WeightDtype.INT4}, max_error={"user": 1e-3})
    with pytest.raises(ParityError, match="table 'user': INT4 moves an element by"):
        export_model(collection(), tmp_path / "r", "m", config, progress=watch)
    assert {len(processes) for processes in started} == {1}
    assert children(os.getpid()) == before


def test_one_process_answers_for_all_bundles_of_an_export(tmp_path: Path) -> None:
    with in_this_process():
        whole = export_model(collection(), tmp_path / "r", "whole")
        cut = export_model(collection(seed=1), tmp_path / "r", "cut", ExportConfig(sharding=Sharding(ranks=2)))
    with FreshProcess() as fresh:
        for bundle in (whole, cut):
            probe = make_probe(open_bundle(bundle).manifest, {})
            expected = Engine.open(bundle).outputs(probe)
            outputs = fresh.outputs(bundle, probe)
            assert {name: value.tobytes() for name, value in outputs.items()} == {
                name: value.tobytes() for name, value in expected.items()
            }
        with pytest.raises(ParityError, match=r"a fresh process could not answer from it:\n(.|\n)*not there"):
            fresh.outputs(tmp_path / "not there", probe)
        with pytest.raises(ParityError, match="a fresh process could not answer from it"):
            fresh.outputs(whole, probe)


def lives(process: Path) -> bool:
    """Whether a process, a folder of /proc, has not ended. One that nobody waited for has no command line."""
    try:
        return bool((process / "cmdline").read_bytes())
    except OSError:
        return False


EXPORT_AND_WAIT = """
import sys, time
from export import export_model
from tests.support.models import collection
def wait(progress):
    print("storing", flush=True)
    time.sleep(60)
export_model(collection(), sys.argv[1], "m", progress=wait)
"""


@pytest.mark.long
def test_the_process_ends_when_the_export_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXPORT_AND_WAIT, str(tmp_path / "r")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as export:
        assert export.stdout is not None
        assert any(line.strip() == "storing" for line in export.stdout)
        (fresh,) = (Path("/proc") / child for child in children(export.pid))
        export.kill()
    for _ in range(600):  # its imports have to be over
        if not lives(fresh):
            return
        time.sleep(0.1)
    pytest.fail(f"{fresh} lives on")
