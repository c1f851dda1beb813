"""What is no delta is refused by name, whoever wrote it; safetensors' own library writes what is right."""

import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from export import squash
from export.publish import lineage
from serving.bundle import WeightDtype, open_bundle
from serving.bundle.delta import parse_delta
from serving.bundle.lineage import Step, lineage_of
from serving.bundle.load import Bundle
from serving.engine import Engine
from serving.errors import BundleError, ConfigurationError
from serving.log import LogFormat
from serving.model.settings import WeightsMemory
from serving.server import delta_service
from serving.tables import memory_budget
from serving.tables.mutable_tables import LIVE_SERVER, live_copies
from tests.support import server_waits
from tests.support.commands import tbe_export
from tests.support.long_cases import one_in
from tests.support.mutable_tables import applying, publish_number, published, wait_until, wait_until_applied

ROWS, DIM = 100, 8


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(published(tmp_path_factory.mktemp("deltas"), ROWS, DIM, WeightDtype.INT8))


def tensors(**changed: Any) -> dict[str, Any]:
    rows = np.zeros((3, DIM + 4), np.uint8)
    return {"t/ids": np.array([1, 5, 99], np.int64), "t/rows": rows} | changed


def metadata(bundle: Bundle, **changed: str) -> dict[str, str]:
    right = {"format": "1", "lineage": lineage_of(bundle.digest), "sequence": "7"}
    return right | {"written_at": "1795600000.5", "sha256": "0" * 64} | changed


def sealed(content: bytes, zeros: bytes = b"0" * 64) -> bytes:
    """A file with the SHA-256 that its header says. It was written with zeros there."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return content.replace(b'"sha256":"' + zeros, b'"sha256":"' + digest)


def parse(bundle: Bundle, content: bytes) -> Any:
    return parse_delta(Path("d"), content, bundle.manifest, lineage_of(bundle.digest), Step(7, 6))


def test_a_file_written_by_safetensors_is_read(bundle: Bundle) -> None:
    rows = np.arange(3 * (DIM + 4), dtype=np.uint8).reshape(3, DIM + 4)
    delta = parse(bundle, sealed(save(tensors(**{"t/rows": rows}), metadata(bundle))))
    assert (delta.sequence, delta.written_at, [*delta.tables]) == (7, 1795600000.5, ["t"])
    np.testing.assert_array_equal(delta.tables["t"].ids, [1, 5, 99])
    np.testing.assert_array_equal(delta.tables["t"].rows, rows)


def test_a_delta_may_have_no_row(bundle: Bundle) -> None:
    """Of a host, in place of one that a killed writer left out."""
    assert parse(bundle, sealed(save({}, metadata(bundle)))).tables == {}


_NAN = np.zeros((3, DIM + 4), np.uint8)
_NAN[1, :4] = np.array([np.nan, 0], np.float16).view(np.uint8)
_INF = np.zeros((3, DIM + 4), np.uint8)
_INF[2, :4] = np.array([1, -np.inf], np.float16).view(np.uint8)

WRONG_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"t/ids": None}, "'/ids' and '/rows' of each table"),
    "no rows": ({"t/rows": None}, "'/ids' and '/rows' of each table"),
    "another table": ({"u/ids": np.zeros(1, np.int64), "u/rows": np.zeros((1, 12), np.uint8)}, "got 'u'"),
    "another tensor": ({"t/scales": np.zeros(3, np.uint8)}, "'/ids' and '/rows' of each table"),
    "ids of int32": ({"t/ids": np.zeros(3, np.int32)}, "the header of a delta"),
    "rows of floats": ({"t/rows": np.zeros((3, DIM), np.float32)}, "the header of a delta"),
    "ids of uint8": ({"t/ids": np.zeros(3, np.uint8)}, r"expected ids int64 \[n\]"),
    "a row less": ({"t/rows": np.zeros((2, DIM + 4), np.uint8)}, r"got int64 \[3\] and uint8 \[2, 12\]"),
    "narrow rows": ({"t/rows": np.zeros((3, DIM + 3), np.uint8)}, r"rows uint8 \[n, 12\]"),
    "rows in one line": ({"t/rows": np.zeros(3 * (DIM + 4), np.uint8)}, r"rows uint8 \[n, 12\]"),
    "ids in two lines": ({"t/ids": np.array([[1, 2, 3]], np.int64)}, r"expected ids int64 \[n\]"),
    "no row at all": (
        {"t/ids": np.zeros(0, np.int64), "t/rows": np.zeros((0, DIM + 4), np.uint8)},
        "at least one row",
    ),
    "a row twice": ({"t/ids": np.array([1, 5, 5], np.int64)}, "sorted, each once"),
    "not in order": ({"t/ids": np.array([5, 1, 7], np.int64)}, "sorted, each once"),
    "beyond the table": ({"t/ids": np.array([1, 5, 100], np.int64)}, r"row numbers in \[0, 100\)"),
    "differences that overflow": (
        {
            "t/ids": np.array([0, 1, 2**63 - 1, -(2**63), -1, 7], np.int64),
            "t/rows": np.zeros((6, DIM + 4), np.uint8),
        },
        "sorted, each once",
    ),
    "65 dimensions": ({"t/ids": np.zeros((1,) * 32, np.int64)}, "the header of a delta"),
    "below zero": ({"t/ids": np.array([-1, 5, 7], np.int64)}, r"row numbers in \[0, 100\)"),
    "NaN": ({"t/rows": _NAN}, "row 5 holds NaN or infinity"),
    "infinity": ({"t/rows": _INF}, "row 99 holds NaN or infinity"),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_named(what: str, bundle: Bundle) -> None:
    changed, said = WRONG_TENSORS[what]
    wrong = {name: tensor for name, tensor in tensors(**changed).items() if tensor is not None}
    with pytest.raises(BundleError, match=said):
        parse(bundle, sealed(save(wrong, metadata(bundle))))


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "2"},
        {"lineage": "0" * 32},
        {"sequence": "8"},
        {"sequence": "07"},
        {"sequence": "-7"},
        {"sequence": "seven"},
        {"written_at": "nan"},
        {"written_at": "yesterday"},
        {"written_at": "9" * 400},
        {"sha256": "A" * 64},
        {"more": "x"},
    ],
)
def test_another_delta_or_format_is_named(changed: dict[str, str], bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"expected (the header of a delta|delta 7 of lineage)"):
        parse(bundle, sealed(save(tensors(), metadata(bundle, **changed))))


def _edited(edit: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """A change of the header of a file."""

    def change(content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        edit(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        return sealed(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return change


WRONG_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "half a length": lambda content: content[:4],
    "a length beyond the file": lambda content: struct.pack("<Q", 1 << 40) + content[8:],
    "no JSON": lambda content: content[:8] + b"}" + content[9:],
    "a byte less": lambda content: sealed(content[:-1]),
    "a byte more": lambda content: sealed(content + b"\0"),
    "both at one place": _edited(
        lambda header: header["t/ids"].update(data_offsets=header["t/rows"]["data_offsets"])
    ),
    "a hole": _edited(lambda header: header["t/rows"].update(data_offsets=[25, 61])),
    "offsets that lie": _edited(lambda header: header["t/rows"].update(data_offsets=[24, 48])),
    "negative offsets": _edited(lambda header: header["t/rows"].update(data_offsets=[-12, 24])),
    "a huge shape": _edited(lambda header: header["t/rows"].update(shape=[2**62, 4])),
    "no metadata": _edited(lambda header: header.pop("__metadata__")),
    "no SHA-256": _edited(lambda header: header["__metadata__"].pop("sha256")),
    "an unknown key": _edited(lambda header: header["t/rows"].update(device="cpu")),
    "a key twice": lambda content: sealed(content.replace(b'"t/ids":', b'"t/rows":')),
}


@pytest.mark.parametrize("what", WRONG_BYTES)
def test_bytes_that_are_no_delta_are_named(what: str, bundle: Bundle) -> None:
    content = save(tensors(), metadata(bundle))
    changed = WRONG_BYTES[what](content)
    assert changed != content
    with pytest.raises(BundleError, match=r"^d: "):
        parse(bundle, changed)


@pytest.mark.promise("Every flipped bit of an unsigned delta is refused by name")
def test_every_bit_of_a_delta_is_checked(bundle: Bundle) -> None:
    """A bit that a disk or a copy changed: in rows, it would be another number, which nobody could tell."""
    content = sealed(save(tensors(), metadata(bundle)))
    assert parse(bundle, content).digest.encode() in content
    for number in range(len(content) * 8):
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        with pytest.raises(BundleError, match=r"^d: expected"):
            parse(bundle, bytes(changed))


@given(data=st.data())
def test_a_changed_byte_is_read_as_a_delta_or_refused(data: st.DataObject, bundle: Bundle) -> None:
    """Whoever makes its SHA-256 anew. Nothing else is raised, and what is read fits the table."""
    content = bytearray(save(tensors(), metadata(bundle)))
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    try:
        delta = parse(bundle, sealed(bytes(content)))
    except BundleError:
        return
    for ids, rows in delta.tables.values():
        assert rows.shape == (len(ids), DIM + 4)
        assert ids.min() >= 0
        assert ids.max() < ROWS


def test_verify_names_damaged_and_missing_deltas(tmp_path: Path) -> None:
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    folder = tmp_path / "r.deltas" / "m" / lineage_of(open_bundle(path).digest)
    for number in range(1, 6):
        publish_number(path, number, [number], DIM)
    squash(tmp_path / "r", "m", until=2)
    right = tbe_export("verify", str(path))
    assert (right.exit_code, "6 deltas were read\n" in right.stdout) == (0, True)
    bad, missing = folder / "000000000002.since-0.safetensors", folder / "000000000004.safetensors"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    missing.unlink()
    wrong = tbe_export("verify", str(path))
    assert (wrong.exit_code, "5 deltas were read\n" in wrong.stdout) == (1, True)
    assert wrong.stderr.splitlines()[0].startswith(f"tbe-export: {bad}: expected bytes of SHA-256 ")
    assert wrong.stderr.splitlines()[1:] == [f"tbe-export: {path}: delta 4 is missing, and 5 is there"]
    elsewhere = tbe_export("verify", str(path), "--deltas", str(tmp_path / "none"))
    assert (elsewhere.exit_code, "were read" in elsewhere.stdout) == (0, False)


def test_the_log_says_which_delta_was_applied_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its lineage, its number and its SHA-256: of the file, with zeros in place of the digits that it holds."""
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    name = lineage_of(open_bundle(path).digest)
    file = tmp_path / "r.deltas" / "m" / name / "000000000002.safetensors"
    monkeypatch.setattr(delta_service, "_LOG_PERIOD_S", 0.0)
    with applying(path, monkeypatch, LogFormat.JSON) as copies, Engine.open(path, memory=WeightsMemory.LIVE):
        wait_until(copies, lambda status: status.sequence == 0)
        for number in (1, 2):
            publish_number(path, number, [3], DIM)
            wait_until_applied(copies, number)
        time.sleep(0.5)
    content = file.read_bytes()
    says = re.search(rb'"sha256":"([0-9a-f]{64})"', content)
    assert says is not None
    assert hashlib.sha256(content.replace(says[1], b"0" * 64)).hexdigest() == says[1].decode()
    lines = [json.loads(line) for line in (tmp_path / "delta_writer.log").read_text().splitlines()]
    assert [(line["event"], line["level"], line["lineage"]) for line in lines] == [
        ("deltas_applied", "INFO", name)
    ] * len(lines)
    assert [line["sequence"] for line in lines] == [0, 1, 2]
    assert "sha256" not in lines[0]
    assert (lines[2]["sha256"], lines[2]["model"], lines[2]["version"]) == (says[1].decode(), "m", 1)
    assert lines[2]["message"] == "m 1: deltas are applied up to 2"


def test_stopped_and_resumed_deltas_are_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    folder = tmp_path / "r.deltas" / "m" / lineage_of(open_bundle(path).digest)
    folder.mkdir(parents=True)
    bad = folder / "000000000001.safetensors"
    bad.write_bytes(b"bad")
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE) as engine:
        wait_until(copies, lambda applied: "expected a delta" in applied.stopped)
        time.sleep(1)  # it is looked at several times
        bad.unlink()
        publish_number(path, 5, [3], DIM)
        wait_until_applied(copies, 1)
        assert engine.rows("t", [3]).tolist() == [[5.0] * DIM]
        log = tmp_path / "delta_writer.log"
        server_waits.wait_until(lambda: "deltas_go_on" in log.read_text(), "the log does not say that they go on")
        time.sleep(0.5)
    lines = (tmp_path / "delta_writer.log").read_text().splitlines()
    why, then = [line for line in lines if " deltas_applied: " not in line]
    assert why.partition(" ")[2] == (
        f"ERROR tbe-serve deltas_stopped: m 1: deltas are applied up to 0: {bad}: expected a delta, got 3 bytes that are no safetensors: copy "
        "it again, or remove it and all after it, and publish what changed"
    )
    assert (
        " INFO tbe-serve deltas_go_on: m 1: deltas are applied up to " in then
    )  # it may not be applied yet when that is seen
    assert then.endswith(": deltas are applied again")


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version serves, and deltas are applied as soon as it can."""
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    folder = tmp_path / "r.deltas"
    folder.write_text("a file in its place")
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE) as engine:
        wait_until(copies, lambda status: f"{folder}/" in status.stopped and "Not a directory" in status.stopped)
        folder.unlink()
        publish_number(path, 5, [3], DIM)
        assert wait_until_applied(copies, 1).stopped == ""
        assert engine.rows("t", [3]).tolist() == [[5.0] * DIM]


def test_a_removed_or_replaced_applied_delta_stops_later_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would serve another history than servers that start now, and nobody would know."""
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE) as engine:
        for number in (1, 2, 3):
            publish_number(path, number, [3], DIM)
        wait_until_applied(copies, 3)
        (folder,) = (tmp_path / "r.deltas" / "m").iterdir()
        third = folder / "000000000003.safetensors"
        content = third.read_bytes()
        third.unlink()
        third.write_bytes(content)  # what brings deltas from elsewhere may bring one again
        publish_number(path, 4, [3], DIM)
        wait_until_applied(copies, 4)
        for number in (2, 3, 4):
            (folder / f"{number:012d}.safetensors").unlink()
        for number in (20, 30, 40, 50):  # under the numbers 2, 3, 4 and 5
            publish_number(path, number, [3], DIM)
        status = wait_until(copies, lambda status: "was applied, and was removed or replaced since" in status.stopped)
        assert status.sequence == 4
        assert engine.rows("t", [3]).tolist() == [[4.0] * DIM]
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE) as engine:
        assert engine.rows("t", [3]).tolist() == [[50.0] * DIM]


@pytest.mark.parametrize("years", one_in(2, [-40, 40]))
def test_a_wrong_clock_delays_no_delta(years: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of who publishes nor a time that goes back between two deltas."""
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE) as engine:
        for number, shift in ((1, years), (2, 0), (3, -years)):
            now = time.time() + shift * 365 * 86400
            monkeypatch.setattr(lineage, "time", SimpleNamespace(time=lambda now=now: now))
            publish_number(path, number, [3], DIM)
            assert wait_until_applied(copies, number).stopped == ""
            assert engine.rows("t", [3]).tolist() == [[float(number)] * DIM]


def test_too_little_memory_for_a_live_copy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: 1 << 20)
    with (
        applying(path, monkeypatch) as copies,
        pytest.raises(ConfigurationError, match=r"weights-memory 'live': .* cannot be copied, which takes 4 MiB: .*"),
    ):
        Engine.open(path, memory=WeightsMemory.LIVE)
    assert not live_copies(copies.environment[LIVE_SERVER])


def test_a_link_under_a_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    folder = tmp_path / "r.deltas" / "m" / lineage_of(open_bundle(path).digest)
    folder.mkdir(parents=True)
    (folder / "000000000001.safetensors").symlink_to("nowhere")
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE):
        wait_until(copies, lambda status: "symbolic link" in status.stopped and status.lag_s > 0)


def test_a_folder_that_disappears_for_a_while_stops_deltas_for_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount that is lost and comes back."""
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE) as engine:
        publish_number(path, 1, [3], DIM)
        wait_until_applied(copies, 1)
        (tmp_path / "r.deltas").rename(tmp_path / "away")
        wait_until(copies, lambda status: "was removed or replaced since" in status.stopped)
        (tmp_path / "away").rename(tmp_path / "r.deltas")
        publish_number(path, 2, [3], DIM)
        assert wait_until_applied(copies, 2).refused == 1
        assert engine.rows("t", [3]).tolist() == [[2.0] * DIM]


def test_waiting_deltas_are_timed_by_the_local_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time a file has: that of a publisher whose clock is ahead, or of what was copied long ago."""
    path = published(tmp_path, ROWS, DIM, WeightDtype.INT8)
    for number in (1, 2):
        publish_number(path, number, [3], DIM)
    (folder,) = (tmp_path / "r.deltas" / "m").iterdir()
    (folder / "000000000001.safetensors").unlink()
    ahead = time.time() + 3600
    os.utime(folder / "000000000002.safetensors", (ahead, ahead))
    with applying(path, monkeypatch) as copies, Engine.open(path, memory=WeightsMemory.LIVE):
        status = wait_until(copies, lambda status: "is missing, and 2 is there" in status.stopped)
        assert 5 < status.lag_s < 3600
