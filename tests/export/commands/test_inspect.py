"""`tbe-export inspect`."""

import json
import re
from importlib.metadata import version
from pathlib import Path

from export import ExportConfig, export_model
from tests.support.commands import tbe_export
from tests.support.ranker import ranker


def test_inspect_shows_what_a_bundle_holds(mixed: Path) -> None:
    shown = tbe_export("inspect", str(mixed)).stdout
    for words in (("user", "user_id", "32.0 kB", "10.0 kB"), ("genre", "genres", "640 B", "320 B")):
        assert any(all(word in line for word in words) for line in shown.splitlines()), (words, shown)
    assert f"torchrec {version('torchrec')}" in shown
    done = tbe_export("inspect", str(mixed), "--json")
    assert json.loads(done.stdout) == json.loads((mixed / "manifest.json").read_text())
    done = tbe_export("inspect", str(mixed.parent))
    assert done.exit_code == 1
    assert "manifest.json: cannot be read: No such file or directory" in done.stderr


def test_each_column_of_a_table_of_errors_is_explained(tmp_path: Path) -> None:
    bundle = export_model(ranker(), tmp_path / "r", "m", ExportConfig(scores=True))
    lines = [line.rstrip() for line in tbe_export("inspect", str(bundle)).stdout.splitlines()]
    for title in ("largest error of an element of a row", "largest error of a score"):
        (start,) = [number for number, line in enumerate(lines) if line.startswith(title)]
        _, *columns = re.split(" {2,}", lines[start + 1])
        explained = [line for line in lines[start:] if line.startswith("  ") and ": " in line]
        names = {name for line in explained for name in line.strip().split(": ")[0].split(", ")}
        assert {*columns} - {"shape"} <= names
