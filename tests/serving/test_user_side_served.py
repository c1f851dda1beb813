"""Many items of one user, from a server: many requests at once, from captures, and with fresh rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import ExportConfig, OutputDtype, export_model, publish_delta
from serving.bundle.load import open_bundle
from serving.client import LookupClient, Retries
from serving.model.settings import ServingSettings
from serving.requests.captured import read_captured
from serving.server import Server, run_server
from tests.support.long_cases import one_in
from tests.support.managed_collision import bags_of, collection_behind, mch, trained
from tests.support.models import SUM, Bags, Spec, collection, random_bags
from tests.support.mutable_tables import PATIENCE_S, changed_rows
from tests.support.position_weights import LONGEST, positioned
from tests.support.position_weights import SPECS as POSITIONED
from tests.support.random_user_sides import USER_SIDE, meeting
from tests.support.scored_models import EXACT
from tests.support.sequence_models import kjt_of
from tests.support.server_waits import wait_until
from tests.support.servers import FREE, Running, at_once, metric, running, tbe_serve
from tests.support.shared import Ranking, ranking
from tests.support.user_sides import used_from

# Fewer items than are worth it, some slices, and no whole one.
SIZES = (3, 16, 40, 300, 129, 1, 21, 128)
RAW = (Spec("user", 48, 16, "SUM", ("user_id",)), Spec("item", 60, 16, "SUM", ("item_id", "recent")))


class Pairs(nn.Module):
    """Layers over the columns of some collection and a number of each item."""

    def __init__(self, bags: nn.Module, keys: Sequence[str], columns: int) -> None:
        super().__init__()
        self.bags, self.keys = bags, keys
        self.layers = nn.Sequential(nn.Linear(columns + 2, 12), nn.ReLU(), nn.Linear(12, 2))

    def forward(self, ids: KeyedJaggedTensor, price: Tensor) -> Tensor:
        pooled = self.bags(ids)
        pooled = pooled[0] if isinstance(pooled, tuple) else pooled
        answer: Tensor = self.layers(torch.cat([price, pooled.values()], dim=1))
        return answer

    def arguments(self, bags: Mapping[str, Bags], dense: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call."""
        return kjt_of({key: bags[key] for key in self.keys}), torch.from_numpy(dense["price"])


class Served:
    """A model that is served, and its ranking requests.

    Args:
        module: has `arguments`, as `ranking` takes it.
        user_side: what the items share.
        draw: ids and dense inputs of some samples.
        config: of the export.
    """

    def __init__(self, module: Any, user_side: Sequence[str], draw: Any, config: ExportConfig) -> None:
        self.module, self.user_side, self.draw, self.config = module.eval(), user_side, draw, config
        self.config = replace(config, user_side=user_side)

    def export(self, repository: Path, name: str) -> Path:
        example = self.module.arguments(*self.draw(np.random.default_rng(0), 7))
        with used_from(16):
            bundle = export_model(self.module, repository, name, self.config, example=example)
        part = open_bundle(bundle).manifest.dense_part
        assert part is not None
        assert part.user_side is not None, open_bundle(bundle).manifest.notes
        return bundle

    def ranking(self, seed: int, items: int) -> Ranking:
        return ranking(self.module, self.user_side, *self.draw(np.random.default_rng(seed), items))

    def score(self, client: LookupClient, request: Ranking) -> Any:
        return client.score(request.bags, request.dense, shared=self.user_side)

    def expect_right(self, answer: Any, request: Ranking) -> None:
        """But for rounding, relative to the scores of some hundred items."""
        assert isinstance(answer, Mapping), answer
        limit = 1e-5 if self.config.output_dtype is OutputDtype.FP32 else 1e-2
        for name, numbers in answer.items():
            largest = max(1.0, float(np.abs(request.right[name]).max(initial=0)))
            np.testing.assert_allclose(numbers, request.right[name], rtol=0, atol=limit * largest, err_msg=name)


def with_price(bags: dict[str, Bags], random: np.random.Generator, samples: int) -> tuple[Any, Any]:
    return bags, {"price": random.standard_normal((samples, 2), np.float32)}


def models() -> dict[str, Served]:
    torch.manual_seed(0)
    raw = Pairs(
        trained(collection_behind({spec.name: mch(spec.rows) for spec in RAW}, RAW)),
        ("user_id", "item_id", "recent"),
        48,
    )
    attention = meeting(28)
    weighed = Pairs(positioned(), ("user_id", "item_id", "recent", "words"), 16 + 64 + 48)

    def raw_ids(random: np.random.Generator, samples: int) -> tuple[Any, Any]:
        return with_price(bags_of(random, samples, raw.keys), random, samples)

    def short_bags(random: np.random.Generator, samples: int) -> tuple[Any, Any]:
        bags = random_bags(random, POSITIONED, samples)
        short = {key: [[id_ % 300 for id_ in bag[: LONGEST[key]]] for bag in bags[key]] for key in weighed.keys}
        return with_price(short, random, samples)

    return {
        "sequences": Served(attention, USER_SIDE, attention.request, EXACT),
        "raw": Served(raw, ["user_id", "recent"], raw_ids, EXACT),
        "positioned": Served(
            weighed, ["user_id", "recent", "words"], short_bags, replace(EXACT, output_dtype=OutputDtype.FP16)
        ),
    }


@pytest.fixture(scope="module")
def served() -> dict[str, Served]:
    return models()


@pytest.fixture(scope="module")
def server(served: dict[str, Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("user_side")
    for name, model in served.items():
        model.export(folder / "r", name)
    with run_server(folder / "r", FREE, log=folder / "log") as server:
        yield server


@pytest.mark.parametrize("name", one_in(2, ["sequences", "raw", "positioned"]))
def test_rankings_of_concurrent_users_get_the_models_own_scores(
    name: str, server: Server, served: dict[str, Served]
) -> None:
    """In any order, beside requests that share something else, or nothing."""
    model = served[name]
    rankings = [model.ranking(seed, size) for seed, size in enumerate(SIZES * 2)]
    many = sum(len(next(iter(request.right.values()))) >= 16 for request in rankings)
    plain = [model.draw(np.random.default_rng(seed), 5) for seed in range(4)]
    with LookupClient(server.grpc, name, 30, retries=Retries(attempts=1)) as client:
        client.info()
        alone = [client.score(*request) for request in plain]
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(len(rankings)).tolist()
            before = metric(server, "tbe_user_side_total", model=name)
            answers = at_once(
                [
                    *(partial(model.score, client, rankings[number]) for number in order),
                    *(partial(client.score, *request) for request in plain),
                ]
            )
            assert metric(server, "tbe_user_side_total", model=name) == before + many
            for number, answer in zip(order, answers, strict=False):
                model.expect_right(answer, rankings[number])
            for answer, expected in zip(answers[len(order) :], alone, strict=True):
                for output, numbers in expected.items():
                    np.testing.assert_allclose(answer[output], numbers, rtol=0, atol=1e-5 * np.abs(numbers).max())


def test_a_request_that_shares_other_names_uses_the_whole_dense_part(
    server: Server, served: dict[str, Served]
) -> None:
    model = served["raw"]
    bags, dense = model.draw(np.random.default_rng(0), 20)
    fewer = ranking(model.module, ["user_id"], bags, dense)
    more = ranking(model.module, [*model.user_side, "price"], bags, dense)
    before = metric(server, "tbe_user_side_total", model="raw")
    with LookupClient(server.grpc, "raw", 30) as client:
        model.expect_right(client.score(fewer.bags, fewer.dense, shared=["user_id"]), fewer)
        model.expect_right(client.score(more.bags, more.dense, shared=[*model.user_side, "price"]), more)
    assert metric(server, "tbe_user_side_total", model="raw") == before


@pytest.mark.long
def test_rankings_are_captured_and_replayed(tmp_path: Path) -> None:
    serving = ServingSettings(capture=str(tmp_path), capture_slow_ms=0.001)
    model = models()["sequences"]
    model.config = replace(model.config, serving=serving)
    bundle = model.export(tmp_path / "r", "m")
    request = model.ranking(0, 20)
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client:
            model.score(client, request)
        wait_until(lambda: metric(server, "tbe_captured_total", model="m") == 1, "a captured request")
        (captured,) = read_captured(tmp_path / "m.jsonl")
        assert {*captured.shared} == {*USER_SIDE}
        bench = ("bench", "m", "--url", server.grpc, "--bundle", str(bundle), "--seconds", "0.4", "--repeats", "1")
        done = tbe_serve(*bench, "--clients", "2", "--check", "1", "--replay", str(tmp_path / "m.jsonl"))
        assert done.returncode == 0, done.stderr
        assert "all right" in done.stdout
        assert metric(server, "tbe_user_side_total", model="m") > 1


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = collection(SUM)
        self.layers = nn.Sequential(nn.Linear(28, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        answer: Tensor = self.layers(self.embeddings(ids).values())
        return answer

    def arguments(self, bags: Mapping[str, Bags], dense: Mapping[str, Any]) -> tuple[Any, ...]:  # noqa: ARG002
        """The arguments of a call."""
        return (kjt_of({key: bags[key] for key in ("x", "y", "z")}),)


def wait_for_delta(server: Running, number: int) -> None:
    wait_until(lambda: metric(server, "tbe_delta_sequence", model="m", version="1") == number, f"delta {number}")


@pytest.mark.long
def test_rankings_read_fresh_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = replace(EXACT, serving=ServingSettings(weights_memory="live"))
    module = Summed()
    model = Served(module, ["x"], lambda random, samples: (dict(random_bags(random, SUM, samples)), {}), config)
    model.export(tmp_path / "r", "m")
    random = np.random.default_rng(0)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", PATIENCE_S) as client:
        for number in (1, 2):
            publish_delta(tmp_path / "r", "m", changed_rows(module.embeddings, random, lambda rows: rows // 2))
            wait_for_delta(server, number)
            for seed in range(4):
                request = model.ranking(seed, 30)
                model.expect_right(model.score(client, request), request)
        assert metric(server, "tbe_user_side_total", model="m") == 8
