"""Requests that were kept for replay, as they are read."""

from pathlib import Path

import pytest

from serving.errors import ConfigurationError
from serving.request.captured import read_captured


@pytest.mark.parametrize("number", ["9" * 5000, f"{10**30}", "1e400", "nan", '"x"', "\udcff"])
def test_a_captured_number_that_is_none_is_refused_by_its_line(number: str, tmp_path: Path) -> None:
    good = '{"at": "", "why": "", "values": [1], "lengths": [1]}\n'
    for bad in (good.replace("[1]", f"[{number}]", 1), good.replace('"lengths": [1]', f'"lengths": [{number}]')):
        (tmp_path / "captured.jsonl").write_bytes((good + bad).encode(errors="surrogateescape"))
        with pytest.raises(ConfigurationError, match=r"captured\.jsonl: line 2: expected a captured request: "):
            list(read_captured(tmp_path / "captured.jsonl"))
