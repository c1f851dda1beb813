"""What memory is left for weights, beside other bundles that some process uses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from export import export_model
from serving.bundle.load import hold
from serving.tables import memory_budget
from serving.tables.memory_budget import most_weights_bytes, weights_of_others
from tests.support.models import Spec, collection

GIB = 1 << 30
WEIGHTS = "weights.0.bin"


@pytest.mark.parametrize(
    ("memory", "processes", "expected", "left_if_kept"),
    [
        (100 * GIB, 1, 90 * GIB, 90 * GIB),
        (100 * GIB, 60, 85 * GIB, 100 * GIB - 61 * GIB // 4),
        (2 * GIB, 1, 7 * GIB // 4, 3 * GIB // 2),
        (2 * GIB, 5, 3 * GIB // 4, GIB // 2),
        (GIB // 2, 1, GIB // 4, 0),
        (GIB // 4, 1, 0, -GIB // 4),
    ],
)
def test_processes_need_memory_beside_weights(
    memory: int, processes: int, expected: int, left_if_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: memory)
    assert most_weights_bytes(processes, is_pinned=False) == expected
    assert most_weights_bytes(processes, is_pinned=True) == left_if_kept


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three bundles: m/1, m/2 whose weights are links to those of m/1, and other/1."""
    first = export_model(collection((Spec("t", 100, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    shutil.copytree(first, first.parent / "2")
    shutil.copytree(first.parent, tmp_path / "r" / "other")
    shutil.rmtree(tmp_path / "r" / "other" / "2")
    (first.parent / "2" / WEIGHTS).unlink()
    (first.parent / "2" / WEIGHTS).symlink_to(first / WEIGHTS)
    return tmp_path / "r"


def bytes_taken(bundle: Path) -> int:
    return sum(weights_of_others(bundle, [bundle / WEIGHTS]).values())


def test_a_bundle_in_use_is_counted_once(repository: Path) -> None:
    first, second, other = repository / "m" / "1", repository / "m" / "2", repository / "other" / "1"
    size = (first / WEIGHTS).stat().st_size
    assert bytes_taken(other) == 0
    descriptors = [hold(first), hold(first), hold(second)]
    assert bytes_taken(other) == size  # one file, whoever has it open
    assert bytes_taken(first) == bytes_taken(second) == 0
    os.close(descriptors.pop())
    descriptors.append(hold(other))
    assert bytes_taken(first) == bytes_taken(second) == size
    for descriptor in descriptors:
        os.close(descriptor)
    assert bytes_taken(first) == bytes_taken(other) == 0


def test_bundles_held_by_other_processes_are_counted(repository: Path) -> None:
    program = "import sys; from pathlib import Path; from serving.bundle.load import hold\n"
    program += "hold(Path(sys.argv[1])); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(repository / "other" / "1")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert bytes_taken(repository / "m" / "1") == (repository / "other" / "1" / WEIGHTS).stat().st_size
        process.communicate()
    assert bytes_taken(repository / "m" / "1") == 0


def test_a_process_that_holds_a_bundle_briefly_does_not_count(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = [hold(repository / "other" / "1")]
    monkeypatch.setattr("time.sleep", lambda _: os.close(descriptors.pop()))  # gone after the first look
    assert bytes_taken(repository / "m" / "1") == 0
