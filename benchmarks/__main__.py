"""`make bench`: run every benchmark, print one table, write benchmarks/results/latest.json."""

import json
import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import exporting, inprocess, loading, served, sharding, throughput
from benchmarks.measure import Result, machine
from benchmarks.workload import Workload

LATEST = Path(__file__).parent / "results" / "latest.json"


def main() -> None:
    """Run everything in a temporary folder."""
    console = Console(highlight=False)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="tbe-bench-") as folder:
        console.print("exporting 26 tables with the multi-hot sizes of MLPerf DLRM-v2, dim 64, int8 …")
        workload = Workload.export(Path(folder) / "dlrm" / "repository")
        console.print("in process …")
        results += inprocess.run(workload)
        console.print("served …")
        results += served.run(workload)
        console.print("many clients at once …")
        results += throughput.run(workload, Path(folder) / "throughput")
        console.print("tables cut over ranks, beside TorchRec's …")
        results += sharding.run(workload, Path(folder) / "sharding")
        console.print("load time, 2 MB against 2 GB …")
        results += loading.run(Path(folder) / "loading")
        console.print("exporting a table larger than a quarter of memory …")
        results += exporting.run(Path(folder) / "exporting")
    console.print(_table(results))
    _write(results)
    console.print(f"written to {LATEST.relative_to(Path.cwd())}")


def _table(results: list[Result]) -> Table:
    table = Table(title="lower is better; a ratio compares two rows of this run", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for result in results:
        table.add_row(result.name, result.shown, style="bold" if result.is_ratio else None)
    return table


def _write(results: list[Result]) -> None:
    report = {
        "command": "make bench",
        **machine(),
        "results": {result.name: result.value for result in results if not result.is_ratio},
        "ratios": {result.name: result.value for result in results if result.is_ratio},
    }
    LATEST.parent.mkdir(exist_ok=True)
    draft = LATEST.with_suffix(".new")
    draft.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(draft, LATEST)


if __name__ == "__main__":
    main()
