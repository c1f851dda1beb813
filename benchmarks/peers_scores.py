"""A whole model beside other servers: the same ids and dense inputs in, the same scores out."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.peer_servers import HERE, PEERS, Peer
from benchmarks.peer_workload import MODEL, dlrm
from benchmarks.peers_served import NOTHING, Comparison, Line, compare, figures
from benchmarks.scored_workload import OUTPUT
from benchmarks.scores_workload import ScoresWorkload
from benchmarks.sequences_workload import SequencesWorkload
from benchmarks.served import publish_do_nothing
from benchmarks.workload import DIM, ROW_CAP
from serving.client import LookupClient, ModelInfo
from serving.engine import Engine
from serving.requests.types import Tensors
from serving.server import Ports, run_server
from serving.torchscript import torchscript

NAME, SEQUENCES_NAME = "scores", "scores_sequences"
LOADS = ((1, 1), (1, 32), (128, 1), (128, 32))
ROUNDS = 3
ROUNDS_IN_PROCESS = {1: 500, 128: 150}
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


class Asked(Protocol):
    """A whole model, and requests for its scores."""

    def tensors(self, samples: int) -> list[Tensors]:
        """The requests as we take them."""

    def export(self, repository: Path) -> Path:
        """Our bundle."""

    def write(self, folder: Path, info: ModelInfo) -> None:
        """What peers and the load generator read."""


def run(folder: Path) -> Iterator[Result]:
    """DLRM_DCN with the 26 tables of DLRM-v2; answers a second of 32 clients, and p50 of one."""
    yield from run_beside(NAME, ScoresWorkload.make(dlrm(ROW_CAP, NAME, dim=DIM)), folder, SERVERS)


def run_sequences(folder: Path) -> Iterator[Result]:
    """A ranker over a user's history, beside the same servers."""
    yield from run_beside(SEQUENCES_NAME, SequencesWorkload.make(), folder, SERVERS)


def run_beside(name: str, workload: Asked, folder: Path, servers: Mapping[str, Peer]) -> Iterator[Result]:
    """A whole model under all loads; answers a second of 32 clients, and p50 of one.

    Args:
        name: of the figures.
        workload: the model, and what is asked of it.
        folder: to work in.
        servers: the others.
    """
    repository = folder / "repository"
    bundle = workload.export(repository)
    with (
        run_server(repository, Ports(grpc=0, http=0, operations=0), models=[MODEL]) as server,
        LookupClient(server.grpc, MODEL, 20) as client,
    ):
        workload.write(folder / "rows", client.info())
    for samples, _ in LOADS:
        publish_do_nothing(repository, samples, (1, samples, 1), like=MODEL, output=OUTPUT)
    yield from _in_process(name, workload, in_memory(bundle), folder / "rows")
    lines, absent = compare(Comparison(name, folder, LOADS, ROUNDS, TOLERANCE), servers)
    yield from figures(name, lines, absent)
    yield from ratios(lines, name)
    shutil.rmtree(folder)


def _in_process(what: str, workload: Asked, engine: Engine, rows: Path) -> Iterator[Result]:
    """Ours with all its checks; the program that the others serve, which checks nothing."""
    sys.path.insert(0, str(HERE))
    from model import Model  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    with torchscript():
        peer = Model(rows, "int8")
    for samples, times in ROUNDS_IN_PROCESS.items():
        saved = dict(np.load(rows / f"requests_{samples}.npz"))
        ours, peer_inputs = cycle(workload.tensors(samples)), cycle(zip(saved["ids"], saved["dense"], strict=True))
        candidates: dict[str, Callable[[], Any]] = {
            "ours": lambda ours=ours: engine.outputs(next(ours)),  # type: ignore[misc]
            "peers": lambda peer_inputs=peer_inputs: peer(*next(peer_inputs)),  # type: ignore[misc]
        }
        medians = {name: p50(seconds) for name, seconds in interleave(candidates, times).items()}
        for name, seconds in medians.items():
            yield Result(f"{what}_alone_{name}_p50_b{samples}_s", seconds)
        yield ratio(f"peers_over_ours_{what}_inprocess_b{samples}", medians["peers"] / medians["ours"])


def ratios(lines: Sequence[Line], what: str = NAME) -> Iterator[Result]:
    """The best peer ÷ ours for each load: p50 of one client, the time that an answer takes of several."""
    for samples, clients in LOADS:
        of_load = [line for line in lines if (line["samples"], line["clients"]) == (samples, clients)]
        peers = [peer_over_ours(line) for line in of_load if line["candidate"] not in (MODEL, NOTHING)]
        if peers:
            best = min(peers)
            name = f"best_peer_over_ours_{what}_{'p50' if clients == 1 else f'c{clients}'}_b{samples}"
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
