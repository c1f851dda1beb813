"""What the targets of the Makefile have in common."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_output_of_a_target_is_written_to_a_file_at_once(tmp_path: Path) -> None:
    """Demos and tests of minutes say how far they are."""
    code = "import os, sys; print(1); print(os.fstat(1).st_size, file=sys.stderr)"
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            ["make", "--no-print-directory", f"--eval=probe: ; @{sys.executable} -c '{code}'", "probe"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=out,
            stderr=subprocess.PIPE,
            check=True,
        )
    assert done.stderr == b"2\n"


def test_each_part_of_the_mutants_has_its_files_and_tests() -> None:
    parts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["parts"]
    assert {"requests", "export-rows", "export-plan", "serving-ranks"} <= parts.keys()
    for part in parts.values():
        for pattern in [*part["only_mutate"], *part.get("do_not_mutate", ())]:
            assert [*ROOT.glob(pattern)], pattern
        for path in part["pytest_add_cli_args_test_selection"]:
            assert (ROOT / path).exists(), path
