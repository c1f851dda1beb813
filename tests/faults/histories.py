"""Faults under a load of scores that are made of sequences: a model that is killed, and a host that a router loses."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import ExportConfig, Sharding, export_model
from serving.bundle.load import open_bundle
from serving.client import LookupClient, Retries
from serving.errors import ServingError
from tests.support.host_faults import until
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.models import random_bags
from tests.support.scored_models import EXACT
from tests.support.sequence_models import SPECS, Mixed, kjt_of
from tests.support.servers import supervised

# Scores may be rounded otherwise where requests are merged.
ROUNDING = 1e-5
LONGEST, WIDTH = 8, 3
CALLERS = 4
TIMEOUT_S = 2.0

# Ids of all features, and dense inputs.
Request = tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]


class Attending(nn.Module):
    """Attention of a user over what was seen, which is padded, and a sum of words, which is not; pooled features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Mixed()
        torch.manual_seed(0)
        self.query = nn.Linear(24 + WIDTH, 32)
        self.over = nn.Linear(24 + 32 + 32, 2)

    def forward(self, ids: KeyedJaggedTensor, price: Tensor) -> dict[str, Tensor]:
        pooled_by_feature, rows = self.tables(ids)
        pooled, recent, words = pooled_by_feature.values(), rows["recent"], rows["words"]
        padded = recent.to_padded_dense(LONGEST)
        is_there = torch.arange(LONGEST) < recent.lengths().unsqueeze(1)
        logits = torch.matmul(padded, self.query(torch.cat([pooled, price], dim=1)).unsqueeze(2)).squeeze(2)
        weights = torch.where(is_there, torch.sigmoid(logits), torch.zeros_like(logits))
        sample = torch.repeat_interleave(torch.arange(words.lengths().numel()), words.lengths())
        said = torch.zeros(words.lengths().numel(), 32).index_add_(0, sample, words.values())
        every = self.over(torch.cat([pooled, (weights.unsqueeze(2) * padded).sum(1), said], dim=1))
        return {"like": every[:, 0], "both": every}


class Oracle:
    """Requests for scores, with what the model itself answers, run by TorchRec on the float rows that are served."""

    def __init__(self, model: nn.Module) -> None:
        random = np.random.default_rng(0)
        self.requests = [request(random, int(random.integers(1, 20))) for _ in range(16)]
        self.scores = [own_scores(model, request) for request in self.requests]

    def is_right(self, client: LookupClient, number: int) -> bool:
        """Ask for scores, and compare."""
        return is_close(client.score(*self.requests[number]), self.scores[number])


def request(random: np.random.Generator, samples: int) -> Request:
    """At random. Some histories are empty, and some longer than the model takes."""
    bags = random_bags(random, SPECS, samples, longest=LONGEST + 2)
    return dict(bags), {"price": random.random((samples, WIDTH), np.float32)}


def own_scores(model: nn.Module, request: Request) -> dict[str, npt.NDArray[np.float32]]:
    """What the model itself answers."""
    bags, dense = request
    with torch.no_grad():
        return {name: value.numpy() for name, value in model(kjt_of(bags), torch.from_numpy(dense["price"])).items()}


def is_close(scores: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return scores.keys() == expected.keys() and all(
        np.allclose(scores[name], value, rtol=0, atol=ROUNDING * max(1, np.abs(value).max()))
        for name, value in expected.items()
    )


def example() -> tuple[Any, ...]:
    """A call of the model."""
    bags, dense = request(np.random.default_rng(1), 16)
    return kjt_of(bags), torch.from_numpy(dense["price"])


def config() -> ExportConfig:
    return replace(EXACT, example=example())


def published(folder: Path) -> Oracle:
    """Publish the model `m`; requests for its scores."""
    model = Attending().eval()
    export_model(model, folder / "r", "m", config())
    return Oracle(model)


@dataclass
class Lost:
    """Figures of `host_lost`: what came of requests that need rows of it, and of others.

    Attributes:
        times: how often it was lost.
        refused: requests that need it, while it was lost; and `nameless`, how many of them without its name.
        others_right, others_failed: of those that need nothing of it, while it was lost.
        wrong: of all, at any time.
        right_again: of those that need it, after it was back.
        back_s: the longest from then to the first of these.
    """

    times: int = 0
    refused: int = 0
    nameless: int = 0
    others_right: int = 0
    others_failed: int = 0
    wrong: int = 0
    right_again: int = 0
    back_s: float = 0.0

    def line(self) -> str:
        return (
            f"scores of sequences, a host lost {self.times} times: {self.refused} refused, {self.nameless} of them without "
            f"its name; without it {self.others_right} right, {self.others_failed} failed; {self.wrong} wrong; "
            f"{self.right_again} right after it was back, the first after {self.back_s:.1f} s"
        )


# Rows of `item` are on one host, those of `word` on the other; what is pooled is on the router.
TYPES = {"item": "table_wise", "word": "table_wise", "user": "data_parallel", "genre": "data_parallel"}


def host_lost(folder: Path, times: int) -> Lost:
    """Lose the host that has rows of `item` while scores are asked for that need them, and that do not."""
    model, result = Attending().eval(), Lost()
    sharding = Sharding(ranks=2, ranks_per_host=1, types=TYPES)
    router = export_hosts(folder, model, replace(config(), sharding=sharding))
    plan = open_bundle(router).manifest.plan
    (lost,) = (plan.ranks[shard.rank].host for shard in plan.shards_by_table["item"])
    name = f"host {lost} ({MODEL}-host-{lost}"
    random = np.random.default_rng(0)
    needing = [request(random, 1 + number) for number in range(8)]
    for bags, _ in needing:
        bags["recent"][0] = [1, 2, 3]
    unaffected = [({**bags, "recent": [[] for _ in bags["recent"]]}, dense) for bags, dense in needing]
    requests = [*needing, *unaffected]
    expected = [own_scores(model, request) for request in requests]
    with ExitStack() as stack:
        served = stack.enter_context(fleet(folder, router, "--shard-timeout-ms", str(int(1000 * TIMEOUT_S))))
        pool = stack.enter_context(ThreadPoolExecutor(CALLERS))
        clients = [
            stack.enter_context(LookupClient(served.router.grpc, MODEL, 60, retries=Retries(attempts=1)))
            for _ in range(CALLERS)
        ]

        def ask(number: int) -> bool | str:
            """Whether the answer is right, or what was said instead of it."""
            try:
                return is_close(clients[number % CALLERS].score(*requests[number]), expected[number])
            except ServingError as error:
                return str(error)

        def all_at_once() -> Sequence[bool | str]:
            outcomes = list(pool.map(ask, range(len(requests))))
            result.wrong += sum(outcome is False for outcome in outcomes)
            return outcomes

        until(lambda: all(outcome is True for outcome in all_at_once()), "all are right")
        stack.enter_context(supervised(served.servers[lost]))
        for _ in range(times):
            result.times += 1
            served.servers[lost].process.kill()
            outcomes = all_at_once()
            result.refused += sum(isinstance(outcome, str) for outcome in outcomes[: len(needing)])
            result.nameless += sum(
                isinstance(outcome, str) and name not in outcome for outcome in outcomes[: len(needing)]
            )
            result.others_right += sum(outcome is True for outcome in outcomes[len(needing) :])
            result.others_failed += sum(isinstance(outcome, str) for outcome in outcomes[len(needing) :])
            back = time.monotonic()
            until(lambda: ask(0) is True, "the host is back")
            result.back_s = max(result.back_s, time.monotonic() - back)
            result.right_again += sum(outcome is True for outcome in all_at_once()[: len(needing)])
    return result
