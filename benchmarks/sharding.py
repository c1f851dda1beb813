"""What cutting tables costs when the ranks are in one process, beside TorchRec's own sharded module."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import torchrec_peer, workload
from benchmarks.inprocess import lookup
from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.workload import Arrays, Workload
from export import ExportConfig, Sharding
from serving.bundle.plan import ShardingType
from serving.engine import Engine
from serving.lookup.local_ranks import LocalRanks

RANKS = (2, 4)
ROUNDS = {1: 1000, 128: 200}
REQUESTS = 16


def run(one_rank: Workload, folder: Path) -> list[Result]:
    """The program against TorchRec's, both from (values, lengths) to embeddings; all types at 2 and 4 ranks."""
    torch.set_num_threads(1)
    engines: dict[tuple[str, int], Engine] = {("table_wise", 1): in_memory(one_rank.bundle)}
    for ranks in RANKS:
        for kind in ShardingType:
            cut = kind.value, ranks
            sharding = Sharding(ranks=ranks, ranks_per_host=2, types={"*": kind.value})
            exported = Workload.export(folder / f"{cut}" / "repository", ExportConfig(sharding=sharding))
            engines[cut] = in_memory(exported.bundle)
    module = workload.module()
    peers: dict[tuple[str, int], Any] = {}
    bundle = engines["table_wise", 1].bundle
    for cut, engine in engines.items():
        if cut[0] in torchrec_peer.SHARDING_TYPES:
            peers[cut], by_feature = torchrec_peer.build(module, bundle, *cut, one_rank.request(2))
            _check(engine, by_feature, one_rank.request(16))
    results = []
    for samples, rounds in ROUNDS.items():
        requests = [one_rank.request(samples, seed) for seed in range(REQUESTS)]
        whole = engines["table_wise", 1]
        for cut, engine in engines.items():
            # A few at a time: each has tables of its own, and they share the caches.
            candidates = {"whole": _ours(whole, requests)}
            if engine is whole:
                candidates["checked"] = _checked(engine, requests)
            else:
                candidates["ours"] = _ours(engine, requests)
            if cut in peers:
                candidates["torchrec"] = _torchrec_calls(peers[cut], requests)
            times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
            results += _results(times, "" if engine is whole else f"_{cut[0]}_{cut[1]}", f"_b{samples}")
    return results


def _results(times: dict[str, float], cut: str, batch: str) -> list[Result]:
    ours = times.get("ours", times["whole"])
    results = [Result(f"program{cut}_p50{batch}_s", ours)]
    if "ours" in times:
        results.append(ratio(f"program{cut}_over_one_rank{batch}", ours / times["whole"]))
    if "torchrec" in times:
        results.append(Result(f"torchrec{cut}_p50{batch}_s", times["torchrec"]))
        results.append(ratio(f"torchrec_over_ours{cut}{batch}", times["torchrec"] / ours))
    if "checked" in times:
        results.append(ratio(f"torchrec_over_ours_with_checks{batch}", times["torchrec"] / times["checked"]))
    return results


def _check(engine: Engine, by_feature: Callable[[Arrays], dict[str, torch.Tensor]], request: Arrays) -> None:
    """Both sides give the same answers."""
    torchrec_answer = by_feature(request)
    ours = lookup(engine, request)
    names = [feature.name for feature in engine.bundle.manifest.features]
    joined = np.concatenate([torchrec_answer[name].numpy() for name in names], axis=1)
    np.testing.assert_allclose(ours, joined, rtol=1e-5, atol=1e-5)


def _ours(engine: Engine, requests: list[Arrays]) -> Callable[[], Any]:
    """The program with what TorchRec's is given: lengths, not offsets, and nothing checked."""
    assert isinstance(engine.ranks, LocalRanks)
    return partial(_call_ours, engine.ranks.forward, cycle(_tensors(requests)))


def _call_ours(forward: Any, prepared: Any) -> torch.Tensor:
    values, lengths = next(prepared)
    pooled: torch.Tensor = forward(values, torch.ops.fbgemm.asynchronous_complete_cumsum(lengths), None, None)
    return pooled


def _checked(engine: Engine, requests: list[Arrays]) -> Callable[[], Any]:
    """What the backend does for one request."""
    prepared = cycle(requests)
    return lambda: lookup(engine, next(prepared))


def _torchrec_calls(scripted: Any, requests: list[Arrays]) -> Callable[[], Any]:
    prepared = cycle(_tensors(requests))
    return lambda: scripted(*next(prepared))


def _tensors(requests: list[Arrays]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(request.values), torch.from_numpy(request.lengths).long()) for request in requests]
