"""A whole model beside other servers: the same ids and dense inputs in, the same scores out."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Result, ratio
from benchmarks.peer_servers import PEERS
from benchmarks.peer_workload import MODEL, dlrm
from benchmarks.peers_served import NOTHING, Comparison, Line, compare, seen
from benchmarks.scores_workload import OUTPUT, ScoresWorkload
from benchmarks.served import publish_do_nothing
from benchmarks.workload import DIM, ROW_CAP
from serving.client import LookupClient
from serving.server import Ports, run_server

NAME = "scores"
LOADS = ((1, 1), (1, 32), (128, 1), (128, 32))
ROUNDS = 3
# Redis has no model. The others look up torch's 8-bit rows, which are faster than FP32 ones.
SERVERS = {
    name.replace("_fp32", "_int8"): replace(peer, kind="int8")
    for name, peer in PEERS.items()
    if peer.kind == "fp32" and peer.protocol != "redis"
}
# How far scores may be from the float model's. They are normal numbers of about 6.
TOLERANCE = {"int8": 0.3}


class Spread(NamedTuple):
    """A ratio of a whole run, and the smallest and the largest of a round."""

    value: float
    low: float
    high: float


def run(folder: Path) -> Iterator[Result]:
    """DLRM_DCN with the 26 tables of DLRM-v2; answers a second of 32 clients, and p50 of one."""
    workload = ScoresWorkload.make(dlrm(ROW_CAP, NAME, dim=DIM))
    repository = folder / "repository"
    workload.export(repository)
    with (
        run_server(repository, Ports(grpc=0, http=0, metrics=0), models=[MODEL]) as server,
        LookupClient(server.grpc, MODEL) as client,
    ):
        workload.write(folder / "rows", client.info())
    for samples, _ in LOADS:
        publish_do_nothing(repository, samples, (1, samples, 1), like=MODEL, output=OUTPUT)
    lines, absent = compare(Comparison(NAME, folder, LOADS, ROUNDS, TOLERANCE), SERVERS)
    yield from seen(NAME, lines, absent)
    yield from ratios(lines)
    shutil.rmtree(folder)


def ratios(lines: Sequence[Line]) -> Iterator[Result]:
    """The best peer ÷ ours for each load: p50 of one client, the time that an answer takes of several."""
    for samples, clients in LOADS:
        here = [line for line in lines if (line["samples"], line["clients"]) == (samples, clients)]
        peers = [peer_over_ours(line) for line in here if line["candidate"] not in (MODEL, NOTHING)]
        if peers:
            best = min(peers)
            name = f"best_peer_over_ours_scores_{'p50' if clients == 1 else f'c{clients}'}_b{samples}"
            yield ratio(name, best.value)
            yield ratio(f"{name}_low", best.low)
            yield ratio(f"{name}_high", best.high)


def peer_over_ours(line: Line) -> Spread:
    """The time that a peer takes ÷ ours, which was asked in turn with it."""
    ours = line["beside"]
    if line["clients"] == 1:
        rounds = [peer / our for peer, our in zip(line["p50s_s"], ours["p50s_s"], strict=True)]
        return Spread(line["p50_s"] / ours["p50_s"], min(rounds), max(rounds))
    rounds = [our / peer for peer, our in zip(line["rates"], ours["rates"], strict=True)]
    return Spread(ours["answers_per_s"] / line["answers_per_s"], min(rounds), max(rounds))
