"""`make bench`: run every benchmark, print one table, write the results and docs/benchmarks.md."""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import (
    batch,
    beyond_memory,
    columns,
    curves,
    document,
    exporting,
    fresh,
    headline,
    inprocess,
    instances,
    loading,
    pages,
    peers_all,
    peers_hosts,
    peers_scores,
    rankings,
    routed,
    scores,
    scores_sequences,
    sequences,
    served,
    sharding,
    threads,
    throughput,
)
from benchmarks.measure import Result, machine
from benchmarks.quietness import Quietness
from benchmarks.workload import Workload
from serving.files import replacing
from tests.support.process_cleanup import end_together

RESULTS = Path(__file__).parent / "results"
Part = tuple[str, Callable[[Workload, Path], Iterable[Result]]]

QUICK: tuple[Part, ...] = (
    ("in process", lambda workload, _: inprocess.run(workload)),
    ("served", lambda workload, _: served.run(workload)),
    ("ranks on other hosts", lambda workload, folder: routed.run(workload, folder, routed.QUICK)),
    ("rankings", lambda _, folder: rankings.run(folder, rankings.QUICK)),
    ("beside other servers", lambda _, folder: peers_all.run_quick(folder)),
)
ALL: tuple[Part, ...] = (
    *QUICK[:2],
    ("from columns to a request", lambda _, __: columns.run()),
    ("a file of rows", batch.run),
    ("one request on several threads", lambda workload, _: threads.run(workload)),
    ("ranks on other hosts", routed.run),
    ("whole models", scores.run),
    ("rankings", lambda _, folder: rankings.run(folder)),
    ("sequences", lambda _, folder: sequences.run(folder)),
    ("scores of sequences", lambda _, folder: scores_sequences.run(folder)),
    ("many clients at once", throughput.run),
    ("instances on cores", instances.run),
    ("tables cut over ranks, beside TorchRec's", sharding.run),
    ("huge pages", lambda _, folder: pages.run(folder)),
    ("fresh rows", lambda _, folder: fresh.run(folder)),
    ("tables larger than memory", lambda _, folder: beyond_memory.run(folder)),
    ("load time, 2 MB against 2 GB", lambda _, folder: loading.run(folder)),
    ("cost curves", lambda _, folder: curves.run(folder)),
    ("beside other servers", lambda _, folder: peers_all.run(folder)),
    ("whole models beside other servers", lambda _, folder: peers_scores.run(folder)),
    ("scores of sequences beside other servers", lambda _, folder: peers_scores.run_sequences(folder)),
    ("beside Redis and Ray on several hosts", lambda _, folder: peers_hosts.run(folder)),
    ("exporting a table larger than a quarter of memory", lambda _, folder: exporting.run(folder)),
    ("all 204 million rows of DLRM-v2", lambda _, folder: headline.run(folder)),
)


def main() -> None:
    """Run everything in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer workloads; nothing is written")
    parser.add_argument(
        "--only",
        metavar="PART",
        choices=[part for part, _ in ALL],
        help="this part alone, such as 'whole models'; nothing is written",
    )
    parser.add_argument(
        "--replace", action="store_true", help="with --only: write the part in place of the last whole run's"
    )
    arguments = parser.parse_args()
    if arguments.replace and (arguments.only is None or arguments.quick):
        parser.error("--replace: expected --only PART, without --quick")
    end_together()
    quick = arguments.quick
    parts = [part for part in (QUICK if quick else ALL) if arguments.only in (None, part[0])]
    console = Console(highlight=False)
    results: list[Result] = []
    started = time.monotonic()
    quietness = Quietness()
    with tempfile.TemporaryDirectory(prefix="tbe-bench-") as folder:
        console.print("exporting 26 tables with the multi-hot sizes of MLPerf DLRM-v2, dim 64, int8 …")
        workload = Workload.export(Path(folder) / "dlrm" / "repository")
        for number, (name, run) in enumerate(parts):
            console.print(f"{name} … ({time.monotonic() - started:.0f} s so far)")
            results += run(workload, Path(folder) / str(number))
    console.print(_table(results))
    console.print(f"took {time.monotonic() - started:.0f} s")
    if arguments.replace or (not quick and arguments.only is None):
        report = _report(results, quietness.activity())
        written = _replace(arguments.only, report) if arguments.replace else _write(report)
        console.print(f"written {written.relative_to(Path.cwd())}")
        console.print(f"written {document.write(RESULTS / 'latest.json').relative_to(Path.cwd())}")


def _table(results: list[Result]) -> Table:
    table = Table(title="lower is better; a ratio compares two rows of this run", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for result in results:
        table.add_row(result.name, result.note or result.shown, style="bold" if result.is_ratio else None)
    return table


def _report(results: list[Result], other_activity: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a run, when and where it was made. `other_activity`: as `Quietness.activity`."""
    return {
        "command": "make bench",
        **machine(),
        "others": other_activity,
        "results": {result.name: result.value for result in results if not result.is_ratio and not result.note},
        "ratios": {result.name: result.value for result in results if result.is_ratio},
        "spreads": {result.name: result.spread for result in results if result.spread is not None},
        "absent": {result.name: result.note for result in results if result.note},
    }


def _write(report: dict[str, Any]) -> Path:
    """`<date>-<machine>.json`, and the link `latest.json` to it."""
    name = f"{report['machine']['cpu']} {report['machine']['cores']} cores".lower()
    path = RESULTS / f"{report['date'][:10]}-{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}.json"
    RESULTS.mkdir(exist_ok=True)
    _save(report, path)
    link = RESULTS / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    os.replace(link, RESULTS / "latest.json")
    return path


def _replace(part: str, report: dict[str, Any]) -> Path:
    """Put the numbers of one part into the last whole run's file, which says when the part was measured."""
    path = (RESULTS / "latest.json").resolve(strict=True)
    whole = json.loads(path.read_text())
    for field in ("cpu", "cores"):
        if report["machine"][field] != whole["machine"][field]:
            raise SystemExit(
                f"{path}: expected a run on this machine, {field} {report['machine'][field]}, "
                f"got {whole['machine'][field]}: run `make bench`"
            )
    for kind in ("results", "ratios", "spreads", "absent"):
        whole[kind] |= report[kind]
    whole.setdefault("parts", {})[part] = {field: report[field] for field in ("date", "versions", "others")}
    _save(whole, path)
    return path


def _save(report: dict[str, Any], path: Path) -> None:
    with replacing(path) as file:
        file.write(json.dumps(report, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
