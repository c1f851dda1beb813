"""Our engine beside torch's own ways to pool embeddings, in one process, on the same ids."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.peer_servers import HERE
from benchmarks.peer_workload import PeerWorkload
from benchmarks.peers_served import TOLERANCE

ROUNDS = {1: 500, 128: 100}


def run(workload: PeerWorkload, bundle: Path, rows: Path) -> Iterator[Result]:
    """Ours with all its checks; theirs check nothing: nn.EmbeddingBag in FP32, and torch's 8-bit one.

    Args:
        bundle: ours, of `workload`.
        rows: what `workload.write` wrote.
    """
    sys.path.insert(0, str(HERE))
    from tables import Tables  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    engine = in_memory(bundle)
    peers = {kind: Tables(rows, kind) for kind in ("fp32", "int8")}
    for samples, rounds in ROUNDS.items():
        saved = np.load(rows / f"requests_{samples}.npz")
        tensors = workload.tensors(samples)
        for kind, peer in peers.items():
            assert np.abs(peer(saved["ids"][0]) - saved["answer"]).max() <= TOLERANCE[kind]
        assert np.abs(engine.outputs(tensors[0])["embeddings"] - saved["answer"]).max() <= TOLERANCE["int8"]
        ours = cycle(tensors)
        candidates: dict[str, Callable[[], Any]] = {"ours": lambda ours=ours: engine.outputs(next(ours))}  # type: ignore[misc]
        for kind, peer in peers.items():
            candidates[f"embeddingbag_{kind}"] = partial(_call, peer, cycle(saved["ids"]))
        times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
        for name, seconds in times.items():
            yield Result(f"{workload.name}_inprocess_{name}_p50_b{samples}_s", seconds)
        for kind in peers:
            over = times[f"embeddingbag_{kind}"] / times["ours"]
            yield ratio(f"embeddingbag_{kind}_over_ours_{workload.name}_b{samples}", over)


def _call(peer: Callable[[Any], Any], ids: "cycle[Any]") -> Any:
    return peer(next(ids))
