"""Deltas that are squashed come to what they came to one after another, wherever a server is, and whoever is killed."""

import hashlib
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load

from export import Sharding, WeightDtype, compact, publish_delta, squash
from export.errors import PublishError
from export.publish.published import prune, prune_squashed
from serving.bundle.delta import parse_delta
from serving.bundle.lineage import Step, delta_path, deltas_folder, lineage_of, steps_in
from serving.bundle.load import open_bundle
from serving.bundle.signature import TRUSTED_KEYS
from serving.engine import Engine
from serving.errors import BundleError, ConfigurationError
from serving.model.settings import WeightsMemory
from serving.server.delta_service import DeltaService
from serving.tables import delta_writer
from serving.tables.mutable_tables import LiveCopy, remove_unused_live_copies
from tests.support.commands import tbe_export
from tests.support.deltas import listed
from tests.support.long_cases import one_in
from tests.support.mutable_tables import (
    applying,
    publish_number,
    published,
    readers,
    seen_by,
    wait_until,
    wait_until_applied,
)

ROWS, DIM, LAST = 200, 16, 12
KINDS = [
    pytest.param(WeightDtype.INT8, Sharding(), id="int8"),
    pytest.param(WeightDtype.FP16, Sharding(ranks=2, types={"t": "column_wise"}), id="columns"),
    pytest.param(WeightDtype.FP32, Sharding(ranks=2, types={"t": "row_wise"}), id="rows"),
    pytest.param(WeightDtype.INT4, Sharding(ranks=2, types={"t": "data_parallel"}), id="copies"),
]


def folder_of(bundle: Path) -> Path:
    opened = open_bundle(bundle)
    name = opened.lineage
    return deltas_folder(bundle.parent.parent) / bundle.parent.name / name


def some_deltas(bundle: Path, first: int = 1, last: int = LAST) -> None:
    """Deltas whose rows have their number in every element."""
    for number in range(first, last + 1):
        changed = np.random.default_rng(number).choice(ROWS, 1 + number * 5, replace=False)
        publish_number(bundle, number, changed.tolist(), DIM)


def numbers(last: int = LAST) -> npt.NDArray[np.float64]:
    """What is in the rows after them, by row; 0 in those that none of them has."""
    values = np.zeros(ROWS)
    for number in range(1, last + 1):
        values[np.random.default_rng(number).choice(ROWS, 1 + number * 5, replace=False)] = number
    return values


def check(engine: Engine, before: npt.NDArray[np.floating[Any]], last: int = LAST) -> None:
    expected = numbers(last)[:, None]
    np.testing.assert_array_equal(engine.rows("t", np.arange(ROWS)), np.where(expected, expected, before))


@contextmanager
def without_delta_writer(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveCopy]:
    """The live copy of a bundle, to which nobody writes but the block."""
    server = DeltaService(deltas_folder(bundle.parent.parent), {}, logging.getLogger())
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    live = LiveCopy.take(bundle, open_bundle(bundle).manifest, "")
    try:
        yield live
    finally:
        live.close()
        remove_unused_live_copies()


def rows_before(bundle: Path) -> npt.NDArray[np.floating[Any]]:
    with Engine.open(bundle) as engine:
        return engine.rows("t", np.arange(ROWS))


def remove(bundle: Path, sequences: range) -> None:
    for number in sequences:
        delta_path(folder_of(bundle), number).unlink()


@pytest.mark.promise("Squashed deltas give the rows that the single deltas give, for servers at any of them")
@pytest.mark.parametrize(("dtype", "sharding"), one_in(2, KINDS))
@pytest.mark.parametrize("sequence", one_in(2, [5, 0]), ids=["in between", "from the start"])
def test_squashed_deltas_stand_in_for_missing_ones(
    sequence: int, dtype: WeightDtype, sharding: Sharding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = published(tmp_path, ROWS, DIM, dtype, sharding)
    before = rows_before(bundle)
    some_deltas(bundle, last=sequence)
    elsewhere = shutil.copytree(bundle.parent.parent, tmp_path / "elsewhere" / "r") / "m" / "1"
    if sequence:
        shutil.copytree(deltas_folder(bundle.parent.parent), deltas_folder(elsewhere.parent.parent))
    some_deltas(elsewhere, sequence + 1)
    delta = squash(elsewhere.parent.parent, "m")
    assert (delta.sequence, delta.path.name) == (LAST, f"{LAST:012d}.since-0.safetensors")
    with applying(bundle, monkeypatch) as copies, Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:
        check(engine, before, sequence)
        folder_of(bundle).mkdir(parents=True, exist_ok=True)
        shutil.copy(delta.path, folder_of(bundle))
        wait_until_applied(copies, LAST)
        check(engine, before)
        publish_number(bundle, LAST + 1, [7], DIM)
        wait_until_applied(copies, LAST + 1)
        assert (engine.rows("t", [7]) == LAST + 1).all()


@pytest.mark.promise("Squashed deltas give the rows that the single deltas give, for servers at any of them")
def test_a_starting_server_reads_one_squashed_file_and_later_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the deltas lie beside it; it is ready with all that there is."""
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    before = rows_before(bundle)
    some_deltas(bundle)
    squashed = squash(bundle.parent.parent, "m", until=LAST - 2)
    for number in range(1, LAST - 1):  # is none of them read, then nobody notices
        delta_path(folder_of(bundle), number).write_bytes(b"nothing")
    with applying(bundle, monkeypatch) as copies, Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:
        check(engine, before)
        status = wait_until_applied(copies, LAST)
        later_rows = sum(1 + number * 5 for number in (LAST - 1, LAST))
        assert (status.rows, status.stopped) == (squashed.rows + later_rows, "")
        assert squashed.rows == np.count_nonzero(numbers(LAST - 2))


def test_no_model_is_ready_before_later_squashed_deltas_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file may go beyond the delta that a model waits for, which was the newest when it was loaded."""
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    some_deltas(bundle, last=4)
    with without_delta_writer(bundle, monkeypatch) as live:
        copy = delta_writer.AppliedCopy(LiveCopy.attach(live.path))
        some_deltas(bundle, 5)
        squash(bundle.parent.parent, "m")
        for _ in range(100):
            copy.step()
            assert live.state.is_caught_up <= (live.state.sequence >= 4)
        assert (live.state.sequence, live.state.is_caught_up) == (LAST, True)
        copy.close()


@pytest.mark.promise("No row becomes older or is torn while deltas are squashed")
def test_rows_never_tear_or_go_back_while_deltas_are_squashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes squashed deltas in which there is much that it has."""
    dim, last = 256, 18
    bundle = published(tmp_path, ROWS, dim, WeightDtype.INT8)
    publish_number(bundle, 1, range(ROWS), dim)
    with applying(bundle, monkeypatch) as copies:
        reading = readers(bundle, ROWS, last, 2)
        for number in range(2, last, 4):
            wait_until_applied(copies, number - 1)
            elsewhere = tmp_path / f"deltas-{number}"
            shutil.copytree(deltas_folder(bundle.parent.parent), elsewhere)
            for delta_number in range(number, number + 4):
                rows = np.full((ROWS, dim), delta_number, np.float32)
                publish_delta(bundle.parent.parent, "m", {"t": (range(ROWS), rows)}, deltas=elsewhere)
            delta = squash(bundle.parent.parent, "m", deltas=elsewhere)
            shutil.copy(delta.path, tmp_path / "whole")
            (tmp_path / "whole").rename(folder_of(bundle) / delta.path.name)
        for reader in reading:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
        publish_number(bundle, last, range(ROWS), dim)
        reports = [seen_by(reader) for reader in reading]
    assert [(report["torn"], report["backwards"]) for report in reports] == [(0, 0)] * 2


# A delta writer that is killed in the middle of rows: of the slice that is named.
_KILLED = """
import os, sys
from pathlib import Path
from serving.tables import delta_writer
from serving.tables.mutable_tables import LiveCopy
delta_writer._SLICE_S, delta_writer._FIRST_ROWS = 1e-9, 1
copy = delta_writer.AppliedCopy(LiveCopy.attach(Path(sys.argv[1])))
for _ in range(1 + int(sys.argv[3])):
    copy.step()
assert copy._state.sequence < copy._state.begun == int(sys.argv[2])
place, stop = copy._state._numbers[5], copy._state._numbers[6]
with copy._state.writing(stop, 1):
    os._exit(0)
"""


@pytest.mark.promise("The successor of a killed delta writer finishes the squashed delta that was being applied")
@pytest.mark.parametrize("slices", one_in(2, [0, 1, 20]))
@pytest.mark.parametrize("is_squashed", one_in(2, [True, False]))
def test_the_successor_of_a_killed_delta_writer_finishes_its_delta(
    is_squashed: bool, slices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else could be taken by then; and if it is gone, with none."""
    half = LAST // 2
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    before = rows_before(bundle)
    some_deltas(bundle, 1, half)
    begun = squash(bundle.parent.parent, "m").path if is_squashed else delta_path(folder_of(bundle), half)
    since = 0 if is_squashed else half - 1
    with without_delta_writer(bundle, monkeypatch) as live:
        first = delta_writer.AppliedCopy(LiveCopy.attach(live.path))
        while live.state.sequence < since:
            first.step()
        first.close()
        subprocess.run([sys.executable, "-c", _KILLED, live.path, str(half), str(slices)], check=True)
        assert live.state.half_written is not None
        assert (live.state.sequence, live.state.begun) == (since, half)
        squash(bundle.parent.parent, "m")
        some_deltas(bundle, half + 1)
        squash(bundle.parent.parent, "m")  # which goes further
        moved = begun.rename(begun.with_name("gone"))
        successor = delta_writer.AppliedCopy(LiveCopy.attach(live.path))
        successor.step()
        said = f"{delta_path(folder_of(bundle), half)}: was applied in part, and was removed or replaced since"
        assert live.state.stopped.startswith(said)
        moved.rename(begun)
        for _ in range(1000):
            if live.state.sequence == LAST:
                break
            assert live.state.begun in (half, LAST)
            successor.step()
        with Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:
            check(engine, before)
        successor.close()


def test_the_last_squashed_delta_and_the_squashed_file_are_interchangeable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it was applied, and is removed; squashed deltas of another history do not."""
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    some_deltas(bundle)
    with applying(bundle, monkeypatch) as copies, Engine.open(bundle, memory=WeightsMemory.LIVE):
        wait_until_applied(copies, LAST)
        squashed = squash(bundle.parent.parent, "m").path
        remove(bundle, range(1, LAST + 1))
        publish_number(bundle, LAST + 1, [7], DIM)
        assert wait_until_applied(copies, LAST + 1).stopped == ""
        # Another history: the same numbers, other rows.
        remove(bundle, range(LAST + 1, LAST + 2))
        squashed.unlink()
        for number in range(LAST + 1):
            publish_number(bundle, 100 + number, [3], DIM)
        squash(bundle.parent.parent, "m")
        delta_path(folder_of(bundle), LAST + 1).unlink()
        publish_number(bundle, 200, [3], DIM)
        assert "was removed or replaced since" in wait_until(copies, lambda status: bool(status.stopped)).stopped


def test_a_server_continues_after_the_squashed_deltas_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last that they stand for is there, and says the same."""
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    some_deltas(bundle)
    squashed = squash(bundle.parent.parent, "m").path
    with applying(bundle, monkeypatch) as copies, Engine.open(bundle, memory=WeightsMemory.LIVE):
        assert wait_until_applied(copies, LAST).rows == np.count_nonzero(numbers())
        squashed.unlink()
        publish_number(bundle, LAST + 1, [7], DIM)
        assert wait_until_applied(copies, LAST + 1).stopped == ""


def test_compaction_gives_equal_weights_from_squashed_and_single_deltas(tmp_path: Path) -> None:
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    repository = bundle.parent.parent
    some_deltas(bundle)
    expected = [
        (compact(repository, "m", version=1, until=sequence) / "weights.0.bin").read_bytes() for sequence in (8, LAST)
    ]
    for until in (5, 8):
        squash(repository, "m", version=1, until=until)
    squash(repository, "m", version=1)
    squash(repository, "m", version=1)  # is there already
    remove(bundle, range(1, LAST))
    contents = [
        (compact(repository, "m", version=1, until=sequence) / "weights.0.bin").read_bytes() for sequence in (8, LAST)
    ]
    assert contents == expected
    said = r"000000000009.safetensors: is missing: restore it. Without it, rows .* after delta 8, or 12$"
    with pytest.raises(PublishError, match=said):
        compact(repository, "m", version=1, until=10)


def test_deltas_that_cannot_be_squashed_are_named(tmp_path: Path) -> None:
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    repository = bundle.parent.parent
    for count in (0, 1):
        with pytest.raises(PublishError, match=f"expected two deltas or more after 0, found {count}"):
            squash(repository, "m")
        publish_number(bundle, 1, [count], DIM)
    with pytest.raises(ConfigurationError, match=r"until: expected a delta of .*, 2 to 2, got 3"):
        squash(repository, "m", until=3)
    with pytest.raises(ConfigurationError, match="2 to 2, got 1"):
        squash(repository, "m", until=1)
    delta_path(folder_of(bundle), 1).unlink()
    with pytest.raises(PublishError, match=r"000000000001.safetensors: is missing, and 2 is there"):
        squash(repository, "m")
    assert steps_in(folder_of(bundle)) == [Step(2, 1)]


def test_another_file_with_the_name_of_squashed_deltas_is_refused(tmp_path: Path) -> None:
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    some_deltas(bundle)
    squashed = squash(bundle.parent.parent, "m", until=5).path
    opened = open_bundle(bundle)

    def parse(path: Path, step: Step) -> object:
        return parse_delta(path, path.read_bytes(), opened.manifest, lineage_of(opened.digest), step)

    assert parse(squashed, Step(5, 0))
    for other in (Step(5, 1), Step(6, 0), Step(5, 4)):
        with pytest.raises(BundleError, match=f"expected {other} of lineage .*, got deltas 1 to 5 of"):
            parse(squashed, other)
    with pytest.raises(BundleError, match=r"expected deltas 1 to 5 of lineage .*, got delta 5 of"):
        parse(delta_path(folder_of(bundle), 5), Step(5, 0))


@pytest.mark.parametrize("byte", one_in(3, [100, 3, -1]))
def test_a_changed_bit_in_a_squashed_file_stops_deltas_until_its_removal(
    byte: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    before = rows_before(bundle)
    some_deltas(bundle)
    squashed = squash(bundle.parent.parent, "m").path
    content = bytearray(squashed.read_bytes())
    content[byte] ^= 1
    squashed.write_bytes(content)
    with applying(bundle, monkeypatch) as copies, Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:
        stopped = wait_until(copies, lambda status: bool(status.stopped))
        assert (stopped.sequence, stopped.stopped.startswith(f"{squashed}: ")) == (0, True)
        squashed.unlink()
        wait_until_applied(copies, LAST)
        check(engine, before)


@pytest.mark.promise("`compact` and `squash` sign nothing that was not signed")
def test_squashing_needs_a_key_and_accepts_no_unsigned_deltas(
    signed_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, trusted = signed_repository / "key.pem", signed_repository / "trusted.pem"
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8, signing_key=key)
    repository = bundle.parent.parent

    def publish(number: int, signing_key: Path | None) -> Path:
        rows = np.full((1, DIM), number, np.float32)
        return publish_delta(repository, "m", {"t": ([number], rows)}, signing_key=signing_key).path

    for number in (1, 2):
        publish(number, key)
    unsigned = publish(3, None)
    with pytest.raises(BundleError, match=rf"{unsigned.stem}.*\.sig: .*only what a key of .* signed is served"):
        squash(repository, "m", signing_key=key)
    assert listed(folder_of(bundle)) == [1, 2, 3] == [step.sequence for step in steps_in(folder_of(bundle))]
    unsigned.unlink()
    monkeypatch.setenv(TRUSTED_KEYS, str(trusted))
    with pytest.raises(ConfigurationError, match="expected a signing key, since deltas there are signed"):
        squash(repository, "m")
    signatures = [*folder_of(bundle).glob("*.sig")]
    for signature in signatures:
        signature.rename(tmp_path / signature.name)
    squashed = squash(repository, "m").path
    for signature in signatures:
        (tmp_path / signature.name).rename(signature)
    with applying(bundle, monkeypatch) as copies, Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:
        stopped = wait_until(copies, lambda status: bool(status.stopped))
        assert (stopped.sequence, squashed.stem in stopped.stopped) == (0, True)
        squashed.unlink()
        assert squash(repository, "m", signing_key=key).path == squashed
        remove(bundle, range(1, 2))
        wait_until_applied(copies, 2)
        assert engine.rows("t", [1, 2])[:, 0].tolist() == [1, 2]


def test_pruning_removes_deltas_that_every_version_can_take_squashed(tmp_path: Path) -> None:
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    repository, folder = bundle.parent.parent, folder_of(bundle)
    some_deltas(bundle, last=4)
    compact(repository, "m")  # goes on behind 4
    some_deltas(bundle, 5, 9)
    assert prune_squashed(bundle.parent) == 0
    squash(repository, "m", version=1, until=3)
    squash(repository, "m", version=1, until=6)
    squash(repository, "m", version=2, until=8)
    sign = folder / f"000000000003.{'a' * 16}.sig"
    other_signature = folder / f"000000000006.since-0.{'b' * 16}.sig"
    for path in (sign, other_signature):
        path.touch()
    whole = delta_path(folder, 6, 0)
    content = whole.read_bytes()
    whole.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleError, match=rf"{whole.name}: .*they were changed"):
        prune_squashed(bundle.parent)
    assert listed(folder) == [*range(1, 10)]
    whole.write_bytes(content)
    assert prune_squashed(bundle.parent, dry_run=True) == 6
    assert listed(folder) == [*range(1, 10)]
    said = tbe_export("prune", str(bundle.parent), "--keep", "2", "--squashed").stdout
    assert said.splitlines()[-1] == f"{bundle.parent}: 6 squashed deltas: removed"
    assert steps_in(folder) == [Step(6, 0), Step(6, 5), Step(7, 6), Step(8, 4), Step(8, 7), Step(9, 8)]
    assert (sign.exists(), other_signature.exists()) == (False, True)
    expected = [hashlib.sha256((bundle / "weights.0.bin").read_bytes()).hexdigest() for bundle in _both(repository)]
    assert expected[0] == expected[1]
    # A version that goes on in the middle needs what is behind it.
    [*prune(bundle.parent, 1)]
    assert [step for step in steps_in(folder) if step.is_squashed] == []


def _both(repository: Path) -> list[Path]:
    """What versions 1 and 2 come to with all deltas."""
    return [compact(repository, "m", version=version) for version in (1, 2)]


def test_the_command_prints_the_squashed_deltas_and_rows(tmp_path: Path) -> None:
    bundle = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    some_deltas(bundle)
    path = delta_path(folder_of(bundle), LAST, 0)
    rows = np.count_nonzero(numbers())
    said = tbe_export("squash", str(bundle.parent))
    assert said.stdout == f"{path}: {rows} rows, deltas up to {LAST} of version 1 as one\n"
    assert load(path.read_bytes())["t/ids"].tolist() == np.flatnonzero(numbers()).tolist()
