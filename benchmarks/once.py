"""The user side once: 500 items for one user, against the same request with the user's ids repeated for each item."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.scores_model import DENSE, WIDTH, dlrm_dcn
from benchmarks.served import inputs_of
from benchmarks.workload import DIM, ROW_CAP, Workload, module
from examples.hosts.dlrm import ROWS, dlrm_tables
from export import ExportConfig, export_model
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.requests.types import SHARED, Tensors
from serving.server import Ports, run_server

ITEMS, USER_FEATURES, USER_IDS = 500, 10, 50
ITEM_FEATURES = len(ROWS) - USER_FEATURES
REQUESTS, ROUNDS = 8, 100
WAYS = ("once", "repeated")
# A request as it comes with the user's features once, and with them repeated.
Asked = tuple[Tensors, Tensors]


class Towers(nn.Module):
    """A light dense part: a tower for the user, one for the item, and their product."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = dlrm_tables(ROW_CAP, DIM, None)
        columns = USER_FEATURES * DIM
        self.user, self.item = nn.Linear(columns, DIM), nn.Linear(len(ROWS) * DIM - columns + WIDTH, DIM)

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
        """Scores [B]."""
        pooled = self.bags(ids).values()
        user, item = pooled[:, : USER_FEATURES * DIM], pooled[:, USER_FEATURES * DIM :]
        scores: Tensor = (self.user(user) * self.item(torch.cat([item, dense_features], dim=1))).sum(dim=1)
        return scores


def run(_: Workload, folder: Path) -> list[Result]:
    """One client, one request at a time, all candidates in turn. A user has 10 features of 50 ids; each of 500 items
    has 16 features of one id, and a row of dense inputs, which travels either way. The items' embeddings are 2 MB.
    """
    torch.set_num_threads(1)
    # 500 times 500 ids of the user are more than a request may have by default.
    settings = ServingSettings(max_busy_ms=10_000, max_request_ids=1 << 19)
    config = ExportConfig(scores=True, serving=settings)
    widths = {"towers": {DENSE: WIDTH}}
    for name, whole in {"dcn": dlrm_dcn(module()), "towers": Towers()}.items():
        export_model(whole, folder / "repository", name, replace(config, dense_widths=widths.get(name, {})))
    engines = {name: in_memory(folder / "repository" / name / "1") for name in ("dcn", "towers")}
    requests = [request(seed, engines["dcn"].bundle.manifest.keys) for seed in range(REQUESTS)]
    for engine in engines.values():
        for request_pair in requests:
            shared, repeated = (engine.outputs(tensors)["scores"] for tensors in request_pair)
            np.testing.assert_allclose(shared, repeated, rtol=1e-5, atol=1e-5)
    with (
        run_server(folder / "repository", Ports(grpc=0, http=0, operations=0)) as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        candidates = _candidates(client, engines, requests)
        times = {name: p50(seconds) for name, seconds in interleave(candidates, ROUNDS).items()}
    what = [name.removesuffix("_once") for name in times if name.endswith("_once")]
    return [
        *(Result(f"user_side_{name}_p50_n{ITEMS}_s", seconds) for name, seconds in times.items()),
        *(
            ratio(
                f"repeated_over_once_{name}_p50_n{ITEMS}",
                times[f"{name}_repeated"] / times[f"{name}_once"],
            )
            for name in what
        ),
        ratio(f"repeated_over_once_bytes_sent_n{ITEMS}", _bytes(requests[0][1]) / _bytes(requests[0][0])),
        ratio(f"repeated_over_once_ids_n{ITEMS}", requests[0][1].values.size / requests[0][0].values.size),
    ]


def request(seed: int, keys: Any) -> Asked:
    """A request for scores with the user's features once, and with them repeated."""
    random = np.random.default_rng(seed)
    users, items = list(keys)[:USER_FEATURES], list(keys)[USER_FEATURES:]
    dense = {DENSE: random.random((ITEMS, WIDTH), np.float32)}
    heights = np.minimum(ROWS, ROW_CAP)
    of_user = [random.integers(0, rows, USER_IDS) for rows in heights[:USER_FEATURES]]
    of_items = [random.integers(0, rows, ITEMS) for rows in heights[USER_FEATURES:]]
    one = np.ones(len(items) * ITEMS, np.int32)

    def tensors(times: int, shared: list[str]) -> Tensors:
        lengths = np.concatenate([np.full(len(users) * times, USER_IDS, np.int32), one])
        values = np.concatenate([*(np.tile(ids, times) for ids in of_user), *of_items])
        return Tensors(None, values, lengths, outputs=("scores",), dense=dense, shared=shared)

    return tensors(1, users), tensors(ITEMS, [])


def _bytes(tensors: Tensors) -> int:
    """What the tensors of a request take, as they travel."""
    return tensors.values.nbytes + tensors.lengths.nbytes + sum(array.nbytes for array in tensors.dense.values())


def _candidates(
    client: Any, engines: Mapping[str, Engine], requests: Sequence[Asked]
) -> dict[str, Callable[[], Any]]:
    dense = triton.InferInput(DENSE, [1, ITEMS, WIDTH], "FP32")
    dense.set_data_from_numpy(requests[0][0].dense[DENSE][np.newaxis])
    scores = [triton.InferRequestedOutput("scores")]
    candidates: dict[str, Callable[[], Any]] = {}
    for way, name in enumerate(WAYS):
        parameters = {SHARED: ",".join(requests[0][way].shared)} if name == "once" else None
        names = ("embeddings", SHARED)[: 2 - way]
        outputs = [triton.InferRequestedOutput(output) for output in names]
        tensors = cycle([pair[way] for pair in requests])
        inputs = cycle([inputs_of(pair[way]) for pair in requests])

        def looked_up(inputs: Any = inputs, outputs: Any = outputs, parameters: Any = parameters) -> Any:
            return client.infer("dcn", next(inputs), outputs=outputs, parameters=parameters)

        def looked_up_here(tensors: Any = tensors, names: Any = names) -> Any:
            return engines["dcn"].outputs(replace(next(tensors), outputs=names))

        candidates |= {f"lookup_{name}": looked_up, f"lookup_inprocess_{name}": looked_up_here}
        for model_, engine in engines.items():

            def score(model_: str = model_, inputs: Any = inputs, parameters: Any = parameters) -> Any:
                return client.infer(model_, [*next(inputs), dense], outputs=scores, parameters=parameters)

            def score_here(engine: Engine = engine, tensors: Any = tensors) -> Any:
                return engine.outputs(next(tensors))

            candidates |= {f"scores_{model_}_{name}": score, f"scores_{model_}_inprocess_{name}": score_here}
    return candidates
