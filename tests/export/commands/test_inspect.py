"""`tbe-export inspect`."""

import json
from pathlib import Path

from tests.support.commands import tbe_export


def test_inspect_shows_what_a_bundle_holds(mixed: Path) -> None:
    shown = tbe_export("inspect", str(mixed)).stdout
    for words in (("user", "user_id", "32.0 kB", "10.0 kB"), ("genre", "genres", "640 B", "320 B")):
        assert any(all(word in line for word in words) for line in shown.splitlines()), (words, shown)
    assert "torchrec 1.8.0" in shown
    done = tbe_export("inspect", str(mixed), "--json")
    assert json.loads(done.stdout) == json.loads((mixed / "manifest.json").read_text())
    done = tbe_export("inspect", str(mixed.parent))
    assert done.exit_code == 1
    assert "manifest.json: cannot be read: No such file or directory" in done.stderr
