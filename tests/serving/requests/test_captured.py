"""Requests that were kept for replay, as they are read."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.errors import ConfigurationError
from serving.requests import captured as captured_module
from serving.requests.captured import CapturedRequest, SkippedLines, read_captured
from serving.requests.types import Tensors

GOOD = '{"at": "", "why": "", "values": [1], "lengths": [1]}'


def lines_of(path: Path, *lines: bytes) -> tuple[list[list[int]], SkippedLines]:
    """The values of the requests of a file with these lines, and what was passed over."""
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    skipped = SkippedLines()
    return [captured.values for captured in read_captured(path, skipped)], skipped


@pytest.mark.promise("Readers of captured requests skip and count invalid lines")
@pytest.mark.parametrize("number", ["9" * 5000, f"{10**30}", "1e400", "nan", '"x"', "\udcff"])
def test_a_line_with_an_invalid_number_is_skipped_and_counted(number: str, tmp_path: Path) -> None:
    path = tmp_path / "captured.jsonl"
    for bad in (GOOD.replace("[1]", f"[{number}]", 1), GOOD.replace('"lengths": [1]', f'"lengths": [{number}]')):
        requests, skipped = lines_of(path, GOOD.encode(), bad.encode(errors="surrogateescape"), GOOD.encode())
        assert requests == [[1], [1]]
        assert skipped.count == 1
        (said,) = skipped.report(path)
        expected = f"{path}: lines skipped, which are not captured requests: 1; line 2: expected a captured request: "
        assert said.startswith(expected)


@pytest.mark.promise("Readers of captured requests skip and count invalid lines")
@pytest.mark.parametrize(
    "bad",
    [
        GOOD.replace("}", ', "traceparent": 7}'),
        GOOD.replace("}", ', "once": "x"}'),
        GOOD.replace("}", ', "unknown": 1}'),
        GOOD[:20],
        GOOD[:20] + GOOD,
        "[" * 100_000,
        "\0",
        "x" * 200,
    ],
    ids=["trace", "once", "unknown", "half", "half-and-one", "nested", "null", "long"],
)
def test_readers_go_on_behind_a_bad_line(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_module, "LONGEST_LINE", 150)
    path, good = tmp_path / "captured.jsonl", GOOD.encode()
    requests, skipped = lines_of(path, bad.encode(), good, bad.encode(), b"", good)
    assert requests == [[1], [1]]
    assert skipped.count == 2
    assert skipped.first.startswith("line 1: expected ")
    with pytest.raises(ConfigurationError, match=r"captured\.jsonl: line 1: expected "):
        lines_of(path, bad.encode(), bad.encode())


def test_a_last_line_without_a_newline_is_read(tmp_path: Path) -> None:
    path = tmp_path / "captured.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}")
    assert len(list(read_captured(path))) == 2
    path.write_text(f"{GOOD}\n{GOOD[:-3]}")
    skipped = SkippedLines()
    assert len(list(read_captured(path, skipped))) == skipped.count == 1


DENSE = np.array([[0.1, np.nan, np.inf], [-np.inf, 5e-324, -0.0]], np.float32)


def test_a_request_for_scores_is_read_as_it_was(tmp_path: Path) -> None:
    """Bit for bit, numbers that are none among them, of every dtype and shape."""
    sent = Tensors(
        ["x"],
        np.array([1]),
        np.array([1, 0], np.int32),
        outputs=["scores"],
        dense={
            "user": DENSE,
            "none": DENSE[:0],
            "nothing": DENSE[:, :0],
            "relation": np.array([2**63 - 1, -(2**63)]),
            "day": np.array([[[2**31 - 1]], [[-1]]], np.int32),
            "new": np.array([[True, False]]),
        },
    )
    (tmp_path / "captured.jsonl").write_bytes(msgspec.json.encode(CapturedRequest.of(sent, "", "slow: 9 ms")))
    (captured,) = read_captured(tmp_path / "captured.jsonl")
    assert captured.tensors.outputs == ["scores"]
    assert captured.tensors.dense.keys() == sent.dense.keys()
    for name, array in captured.tensors.dense.items():
        assert array.dtype == sent.dense[name].dtype
        assert array.shape == sent.dense[name].shape
        assert array.tobytes() == sent.dense[name].tobytes()


def test_a_captured_lookup_has_no_keys_for_scores(tmp_path: Path) -> None:
    lookup = Tensors(None, np.array([1]), np.array([1], np.int32), weights=np.ones(1, np.float32))
    line = msgspec.json.encode(CapturedRequest.of(lookup, "now", "slow: 9 ms"))
    assert line == b'{"at":"now","why":"slow: 9 ms","values":[1],"lengths":[1]}'
    (tmp_path / "captured.jsonl").write_bytes(line)
    (captured,) = read_captured(tmp_path / "captured.jsonl")
    assert captured.tensors.outputs == lookup.outputs
    assert not captured.tensors.dense


@pytest.mark.parametrize(
    ("dense", "why"),
    [
        ('{"shape": [1, 2], "float32": "AAAAAA=="}', r"expected 8 bytes for shape \[1, 2\], got 4"),
        ('{"shape": [2147483647, 2147483647], "float32": ""}', "expected 18446744056529682436 bytes"),
        ('{"shape": [4294967296, 4294967296], "float32": ""}', "Expected `int` <= 2147483647"),
        ('{"shape": [-1, -1], "float32": "AAAAAA=="}', "Expected `int` >= 0"),
        ('{"shape": [], "float32": "AAAAAA=="}', "length >= 1"),
        ('{"shape": [1]}', "expected a shape and the numbers of one dtype, got shape"),
        ('{"shape": [0], "float32": "", "bool": ""}', "numbers of one dtype, got shape, float32, bool"),
        ('{"shape": [0, 2147483647, 2147483647, 2147483647], "bool": ""}', "array is too big"),
        ('{"shape": [1, 1], "float32": "!"}', "base64"),
        ("[[0.5]]", "Expected `object`"),
    ],
    ids=[
        "size",
        "huge",
        "overflowing",
        "negative",
        "no_dimension",
        "no_numbers",
        "twice",
        "too_many",
        "no_base64",
        "list",
    ],
)
def test_invalid_captured_dense_inputs_are_refused_with_their_line(dense: str, why: str, tmp_path: Path) -> None:
    line = f'{{"at": "", "why": "", "values": [1], "lengths": [1], "dense": {{"user": {dense}}}}}\n'
    (tmp_path / "captured.jsonl").write_text(line)
    with pytest.raises(ConfigurationError, match=r"captured\.jsonl: line 1: expected a captured request: .*" + why):
        list(read_captured(tmp_path / "captured.jsonl"))
