"""Our server beside others that people would use: same tables, same ids, same load generator, called in turn."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, ratio
from benchmarks.peer_servers import ENVIRONMENT, HERE, NOISY, Peer, running
from benchmarks.peer_workload import MODEL, PeerWorkload
from benchmarks.served import do_nothing_name, publish_do_nothing
from serving.server import Ports, run_server
from serving.server.child_process import malloc_environment

NOTHING = "donothing"
# Numbers of samples and of clients.
Loads = Sequence[tuple[int, int]]
LOADS: Loads = ((1, 1), (1, 32), (128, 1), (128, 8))
ROUNDS = 2
SECONDS = 0.8
WARM_UP_S = 0.4
# How far an answer may be from the float rows' sum: rows are normal numbers of 0.05, bags have up to 100.
TOLERANCE = {"fp32": 1e-4, "int8": 0.05}
# What was seen of a candidate under a load.
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all candidates are asked.

    Attributes:
        name: of the workload.
        folder: with our `repository`, models that do nothing in it, and the `rows` and requests that peers read.
        tolerance: how far an answer may be from the right one, by the kind of rows.
    """

    name: str
    folder: Path
    loads: Loads = LOADS
    rounds: int = ROUNDS
    tolerance: Mapping[str, float] = field(default_factory=lambda: TOLERANCE)


def run(workload: PeerWorkload, folder: Path, peers: Mapping[str, Peer], rounds: int = ROUNDS) -> Iterator[Result]:
    """All that are there, under all loads; absent ones are named, with the reason.

    Args:
        folder: with our `repository`, and the `rows` that `workload.write` wrote.
    """
    for samples in workload.requests:
        publish_do_nothing(folder / "repository", samples, (1, samples, workload.width), like=MODEL)
    lines, absent = compare(Comparison(workload.name, folder, rounds=rounds), peers)
    yield from figures(workload.name, lines, absent)
    for samples, clients in LOADS:
        by_candidate = {
            line["candidate"]: line for line in lines if (line["samples"], line["clients"]) == (samples, clients)
        }
        ours, nothing = by_candidate.pop(MODEL), by_candidate.pop(NOTHING)
        if clients == 1:
            yield ratio(f"ours_over_donothing_p50_{workload.name}_b{samples}", ours["p50_s"] / nothing["p50_s"])
        if clients == 1 and by_candidate:
            best = min(line["p50_s"] for line in by_candidate.values())
            yield ratio(f"best_peer_over_ours_p50_{workload.name}_b{samples}", best / ours["p50_s"])
        elif by_candidate:
            best = max(line["answers_per_s"] for line in by_candidate.values())
            yield ratio(f"ours_over_best_peer_rps_{workload.name}_b{samples}", ours["answers_per_s"] / best)


def figures(workload: str, lines: Sequence[Line], absent: Mapping[str, str]) -> Iterator[Result]:
    """Figures of all candidates under all loads; and why others are absent."""
    for name, why in absent.items():
        yield Result(f"{workload}_{name}_absent", 1, unit="", note=why)
    for line in lines:
        where = f"{workload}_{line['candidate']}_c{line['clients']}_b{line['samples']}"
        yield Result(f"{where}_rps", line["answers_per_s"], unit="/s")
        yield Result(f"{where}_p50_s", line["p50_s"])
        yield Result(f"{where}_p99_s", line["p99_s"])


def compare(comparison: Comparison, peers: Mapping[str, Peer]) -> tuple[list[Line], dict[str, str]]:
    """Put each load on ours, a model that does nothing, and `peers`, in turn.

    Returns:
        A line for each candidate and load, a peer's with ours of the same time as `beside`; and who was absent, with
        the reason.
    """
    quiet, noisy = ({name: peers[name] for name in peers if (name in NOISY) is noise} for noise in (False, True))
    models = [MODEL, *map(do_nothing_name, _samples(comparison.loads))]
    with run_server(comparison.folder / "repository", Ports(grpc=0, http=0, operations=0), models=models) as server:
        lines, absent = _together(comparison, server.grpc, quiet)
        if noisy:
            later, absent_too = _together(comparison, server.grpc, noisy)
            lines += [line for line in later if line["candidate"] in noisy]
            absent |= absent_too
    return lines, absent


def _together(comparison: Comparison, ours: str, peers: Mapping[str, Peer]) -> tuple[list[Line], dict[str, str]]:
    """Start `peers`, and put each load on them and ours in turn; what was seen, and who was absent and why."""
    folder, tolerance = comparison.folder, comparison.tolerance
    candidates: dict[str, dict[str, Any]] = {
        MODEL: {"protocol": "ours", "address": ours, "tolerance": tolerance["int8"]},
        NOTHING: {"protocol": "nothing", "address": ours, "tolerance": None},
    }
    absent = {}
    with ExitStack() as stack:
        for name, peer in peers.items():
            try:
                address = stack.enter_context(running(peer, folder / "rows", folder / f"{name}.log"))
            except (OSError, subprocess.CalledProcessError) as error:
                absent[name] = str(error)
                continue
            candidates[name] = {"protocol": peer.protocol, "address": address, "tolerance": tolerance[peer.kind]}
        lines = drive(folder, candidates, comparison.rounds, comparison.loads)
    absent |= {line["candidate"]: line["absent"] for line in lines if "absent" in line}
    for name in (MODEL, NOTHING):
        if name in absent:
            raise RuntimeError(f"{comparison.name}: our own server: {name}: {absent[name]}")
    # A peer that failed under a load has lines of those before.
    present = [line for line in lines if line["candidate"] not in absent]
    of_ours = {(line["samples"], line["clients"]): line for line in present if line["candidate"] == MODEL}
    return [line | {"beside": of_ours[line["samples"], line["clients"]]} for line in present], absent


def drive(folder: Path, candidates: Mapping[str, Any], rounds: int, loads: Loads) -> list[Line]:
    """Put each load on `candidates` in turn; a line for each of both, and for each that is absent."""
    plan = {
        "folder": str(folder / "rows"),
        "samples": _samples(loads),
        "loads": loads,
        "rounds": rounds,
        "seconds": SECONDS,
        "warm_up_s": WARM_UP_S,
        "candidates": candidates,
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    command = [str(ENVIRONMENT / "bin" / "python"), str(HERE / "drive.py"), str(path)]
    # It has the servers' malloc: it shares their cores, and with glibc's a large answer costs it as much again.
    environment = {**malloc_environment(), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, env=environment)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _samples(loads: Loads) -> list[int]:
    return sorted({samples for samples, _ in loads})
