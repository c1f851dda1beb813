"""Requests that were kept for replay, as they are read."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.errors import ConfigurationError
from serving.request.captured import CapturedRequest, read_captured
from serving.request.tensors import Tensors


@pytest.mark.parametrize("number", ["9" * 5000, f"{10**30}", "1e400", "nan", '"x"', "\udcff"])
def test_a_captured_number_that_is_none_is_refused_by_its_line(number: str, tmp_path: Path) -> None:
    good = '{"at": "", "why": "", "values": [1], "lengths": [1]}\n'
    for bad in (good.replace("[1]", f"[{number}]", 1), good.replace('"lengths": [1]', f'"lengths": [{number}]')):
        (tmp_path / "captured.jsonl").write_bytes((good + bad).encode(errors="surrogateescape"))
        with pytest.raises(ConfigurationError, match=r"captured\.jsonl: line 2: expected a captured request: "):
            list(read_captured(tmp_path / "captured.jsonl"))


DENSE = np.array([[0.1, np.nan, np.inf], [-np.inf, 5e-324, -0.0]], np.float32)


def test_a_request_for_scores_is_read_as_it_was(tmp_path: Path) -> None:
    """Bit for bit, numbers that are none among them."""
    sent = Tensors(
        ["x"],
        np.array([1]),
        np.array([1, 0], np.int32),
        outputs=["scores"],
        dense={"user": DENSE, "none": DENSE[:0], "nothing": DENSE[:, :0]},
    )
    (tmp_path / "captured.jsonl").write_bytes(msgspec.json.encode(CapturedRequest.of(sent, "", "slow: 9 ms")))
    (captured,) = read_captured(tmp_path / "captured.jsonl")
    assert captured.tensors.outputs == ["scores"]
    assert captured.tensors.dense.keys() == sent.dense.keys()
    for name, array in captured.tensors.dense.items():
        assert array.dtype == np.float32
        assert array.shape == sent.dense[name].shape
        assert array.tobytes() == sent.dense[name].tobytes()


def test_a_lookup_is_written_as_before_there_were_scores(tmp_path: Path) -> None:
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
        ('{"shape": [1], "float32": "AAAAAA=="}', "length 2"),
        ('{"shape": [1, 1], "float32": "!"}', "base64"),
        ("[[0.5]]", "Expected `object`"),
    ],
    ids=["size", "huge", "overflowing", "negative", "one_dimension", "no_base64", "numbers"],
)
def test_captured_dense_inputs_that_are_none_are_refused_by_their_line(dense: str, why: str, tmp_path: Path) -> None:
    line = f'{{"at": "", "why": "", "values": [1], "lengths": [1], "dense": {{"user": {dense}}}}}\n'
    (tmp_path / "captured.jsonl").write_text(line)
    with pytest.raises(ConfigurationError, match=r"captured\.jsonl: line 1: expected a captured request: .*" + why):
        list(read_captured(tmp_path / "captured.jsonl"))
