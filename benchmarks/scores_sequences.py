"""Scores of a ranker over a user's history: ours against the user's own eager model, served, and for 500 items."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton

from benchmarks import stages
from benchmarks.measure import Result, interleave, p50, ratio_of
from benchmarks.model_memory import in_memory
from benchmarks.peer_workload import MODEL
from benchmarks.scored_workload import OUTPUT
from benchmarks.sequences_model import DENSE, LONGEST
from benchmarks.sequences_workload import DIM, POOLED, ROWS, TARGET, SequencesWorkload
from benchmarks.served import inputs_of
from serving.bundle.tensor_names import SHARED
from serving.engine import Engine
from serving.requests.offsets import ranges
from serving.requests.types import Tensors
from serving.server import Ports, run_server

__all__ = ["DIM", "ITEMS", "LONGEST", "PAUSE_S", "POOLED", "REPEATS", "ROWS", "run"]

NAME = "scores_sequences"
# How many requests there are, and how often they are asked in each repeat, by the number of their samples.
SIZES = {1: 64, 128: 16}
ROUNDS = {1: 300, 128: 60}
COLD_ROUNDS, PAUSE_S = 150, 0.005
ITEMS, USERS, ITEMS_ROUNDS = 500, 8, 20
REPEATS = 5
TOLERANCE = 0.3

Candidates = Mapping[str, Callable[[], Any]]


def run(folder: Path) -> Iterator[Result]:
    """One client, one request at a time, all candidates in turn, on one thread each. A ratio is a median of repeats.

    `eager` is the user's own model with FP32 rows, run by TorchRec on the same ids; `inprocess` is what the backend
    does for a request, without Triton.
    """
    torch.set_num_threads(1)
    workload = SequencesWorkload.make(SIZES)
    engine = in_memory(workload.export(folder / "repository"))
    with (
        run_server(folder / "repository", Ports(grpc=0, http=0, operations=0)) as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        for samples, rounds in ROUNDS.items():
            candidates = _candidates(client, engine, workload, samples)
            yield from _measured(candidates, f"p50_b{samples}", rounds)
        yield from _measured(_candidates(client, engine, workload, 1), "cold_p50_b1", COLD_ROUNDS, PAUSE_S)
        yield from stages.run(server, MODEL, "histories", _candidates(client, engine, workload, 1)["served"])
        yield from _user_once(client, engine, workload)


def _measured(candidates: Candidates, where: str, rounds: int, pause_s: float = 0.0) -> Iterator[Result]:
    repeats = _repeats(candidates, rounds, pause_s)
    for name in candidates:
        yield Result(f"{NAME}_{name}_{where}_s", median(repeat[name] for repeat in repeats))
    yield ratio_of(f"{NAME}_over_eager_{where}", (repeat["inprocess"] / repeat["eager"] for repeat in repeats))
    yield ratio_of(f"{NAME}_served_over_eager_{where}", (repeat["served"] / repeat["eager"] for repeat in repeats))


def _repeats(candidates: Candidates, rounds: int, pause_s: float = 0.0) -> list[dict[str, float]]:
    """The medians of each repeat."""
    return [
        {name: p50(seconds) for name, seconds in interleave(candidates, rounds, pause_s=pause_s).items()}
        for _ in range(REPEATS)
    ]


def _candidates(client: Any, engine: Engine, workload: SequencesWorkload, samples: int) -> Candidates:
    tensors = workload.tensors(samples)
    inputs = [_inputs(tensor) for tensor in tensors]
    expected = workload.eager(tensors[0])
    answers = engine.outputs(tensors[0])[OUTPUT], _served(client, inputs[0])
    for answer in answers:
        np.testing.assert_allclose(answer, expected, rtol=0, atol=TOLERANCE)
    local, eager_inputs, sent = cycle(tensors), cycle(tensors), cycle(inputs)
    return {
        "inprocess": lambda: engine.outputs(next(local)),
        "eager": lambda: workload.eager(next(eager_inputs)),
        "served": lambda: _served(client, next(sent)),
    }


def _inputs(tensors: Tensors) -> list[Any]:
    """The inputs of a KServe request."""
    numbers = tensors.dense[DENSE]
    dense = triton.InferInput(DENSE, [1, *numbers.shape], "FP32")
    dense.set_data_from_numpy(numbers[np.newaxis])
    return [*inputs_of(tensors), dense]


def _served(client: Any, inputs: list[Any], parameters: Any = None) -> Any:
    outputs = [triton.InferRequestedOutput(OUTPUT)]
    return client.infer(MODEL, inputs, outputs=outputs, parameters=parameters).as_numpy(OUTPUT)[0]


def _user_once(client: Any, engine: Engine, workload: SequencesWorkload) -> Iterator[Result]:
    """500 items for one user: the history and the pooled features come once, or are repeated for each item."""
    users = workload.tensors(1)[:USERS]
    keys = list(engine.bundle.manifest.keys)
    requests = [_for_items(user, keys, seed) for seed, user in enumerate(users)]
    for shared, repeated in requests:
        expected = workload.eager(repeated)
        for answer in (engine.outputs(tensors)[OUTPUT] for tensors in (shared, repeated)):
            np.testing.assert_allclose(answer, expected, rtol=0, atol=TOLERANCE)
    candidates: dict[str, Callable[[], Any]] = {}
    for way, name in enumerate(("once", "repeated")):
        local = cycle([pair[way] for pair in requests])
        sent = cycle([_inputs(pair[way]) for pair in requests])
        parameters = {SHARED: ",".join(requests[0][way].shared)} if name == "once" else None
        candidates[f"inprocess_{name}"] = lambda local=local: engine.outputs(next(local))  # type: ignore[misc]
        candidates[f"served_{name}"] = lambda sent=sent, how=parameters: _served(client, next(sent), how)  # type: ignore[misc]
    eager_inputs = cycle([repeated for _, repeated in requests])
    candidates["eager"] = lambda: workload.eager(next(eager_inputs))
    repeats = _repeats(candidates, ITEMS_ROUNDS)
    for name in candidates:
        yield Result(f"{NAME}_{name}_p50_n{ITEMS}_s", median(repeat[name] for repeat in repeats))
    for where in ("inprocess", "served"):
        over = (repeat[f"{where}_repeated"] / repeat[f"{where}_once"] for repeat in repeats)
        yield ratio_of(f"repeated_over_once_{NAME}_{where}_p50_n{ITEMS}", over)
    over = (repeat["inprocess_once"] / repeat["eager"] for repeat in repeats)
    yield ratio_of(f"{NAME}_once_over_eager_p50_n{ITEMS}", over)


def _for_items(user: Tensors, keys: list[str], seed: int) -> tuple[Tensors, Tensors]:
    """A request for the scores of some items, with all but the item once, and with it repeated for each."""
    random = np.random.default_rng(seed)
    items = random.integers(0, ROWS, ITEMS)
    dense = {DENSE: random.random((ITEMS, user.dense[DENSE].shape[1]), np.float32)}
    starts = np.cumsum([0, *user.lengths.tolist()])[:-1]
    rest = [number for number, key in enumerate(keys) if key != TARGET]
    assert keys[-1] == TARGET

    def tensors(times: int, shared: list[str]) -> Tensors:
        keys_of_items = np.repeat(rest, times)
        values = user.values[ranges(starts[keys_of_items], user.lengths[keys_of_items].astype(np.int64))]
        lengths = np.concatenate([user.lengths[keys_of_items], np.ones(ITEMS, np.int32)])
        return replace(user, values=np.concatenate([values, items]), lengths=lengths, dense=dense, shared=shared)

    return tensors(1, [keys[number] for number in rest]), tensors(ITEMS, [])
