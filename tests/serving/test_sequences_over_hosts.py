"""Sequences and rows of tables that are on several hosts, one of them lost."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import Sharding
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.client import JaggedRows, LookupClient, Retries
from serving.engine import Engine
from serving.errors import HostUnavailable, ServerUnavailable
from serving.model.config_file import read_config, settings_of
from serving.router.calls import HostCall, HostCallers
from serving.router.hosts_config import OnShardFailure
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.models import random_bags
from tests.support.sequence_models import FP32, SPECS, Mixed, assert_mixed, check_together
from tests.support.servers import at_once, lose


def recording_order(order: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        order.append(name)
        return function(*arguments)

    return called


def test_sequences_over_hosts_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one process. Hosts are asked for all batches of a request before one is waited for."""
    module = Mixed()
    sharding = Sharding(
        ranks=4,
        ranks_per_host=2,
        types={"item": "row_wise", "word": "column_wise", "user": "table_wise", "genre": "data_parallel"},
    )
    router = export_hosts(tmp_path, module, replace(FP32, sharding=sharding))
    assert set(open_bundle(router).manifest.requires) == {Capability.HOSTS, Capability.SEQUENCES}
    for host in open_bundle(router).manifest.hosts:
        part = open_bundle(router.parents[1] / host.model / str(host.version))
        assert set(part.manifest.requires) == {Capability.HOSTS, Capability.INT32_IDS}
        config = read_config(part.path.parent)
        assert [output.name for output in config.output] == ["embeddings"]
        assert settings_of(config).max_request_samples < 70_000
    with (
        fleet(tmp_path, router) as served,
        LookupClient(served.router.grpc, MODEL, 60) as client,
    ):
        check_together(client.lookup, module)
        items = module.rows.embeddings["item"].weight.detach().numpy()
        ids = np.random.default_rng(0).integers(0, 300, 70_000)  # more than a host takes samples
        np.testing.assert_array_equal(client.rows("item", ids), items[ids])
        users = module.pooled.embedding_bags["user"].weight.detach().numpy()
        np.testing.assert_array_equal(client.rows("user", [3, 3, 499]), users[[3, 3, 499]])
        bags = random_bags(np.random.default_rng(7), SPECS, 5)
        with Engine.open(served.bundle, served.hosts) as engine:
            assert_mixed(engine.lookup(bags), module, bags)
            np.testing.assert_array_equal(engine.rows("item", ids), items[ids])
            order: list[str] = []
            for name in ("ask", "sums"):
                kind = HostCallers if name == "ask" else HostCall
                monkeypatch.setattr(kind, name, recording_order(order, name, getattr(kind, name)))
            assert_mixed(engine.lookup(bags), module, bags)
            asks = order.count("ask")
            assert asks > 1
            assert set(order[:asks]) == {"ask"}
            assert set(order[asks:]) == {"sums"}


@pytest.mark.long
def test_requests_that_need_a_lost_host_fail_alone_or_get_zeros(tmp_path: Path) -> None:
    """Rows of `item` are on one host, those of `word` on the other."""
    module = Mixed()
    types = {"item": "table_wise", "word": "table_wise", "user": "data_parallel", "genre": "data_parallel"}
    sharding = Sharding(ranks=2, ranks_per_host=1, types=types)
    router = export_hosts(tmp_path, module, replace(FP32, sharding=sharding))
    manifest = open_bundle(router).manifest
    (lost,) = (manifest.plan.ranks[shard.rank].host for shard in manifest.plan.shards_by_table["item"])
    (available,) = (manifest.plan.ranks[shard.rank].host for shard in manifest.plan.shards_by_table["word"])
    assert lost != available
    whole: dict[str, Any] = {"recent": [[1, 2], []], "words": [[3], [4, 5]], "user_id": [[6], [7]]}
    need: list[Any] = [whole, {"recent": [[5]]}, {"seen": [[], [8]]}]
    no_need: list[Any] = [{"words": [[3], [4, 5]], "user_id": [[6], [7]]}, {"recent": [[], []], "words": [[1], [2]]}]
    with (
        fleet(tmp_path, router, "--shard-timeout-ms", "1000") as served,
        LookupClient(served.router.grpc, MODEL, 60, retries=Retries(attempts=1)) as client,
        Engine.open(served.bundle, replace(served.hosts, on_shard_failure={"item": OnShardFailure.ZERO})) as engine,
    ):
        expected = [engine.lookup(request) for request in no_need]
        before = engine.lookup(whole)
        lose(served.servers[lost])
        answers = at_once([partial(client.lookup, request) for request in [*need, *no_need] * 4])
        assert len(answers) == 20
        for number, answer in enumerate(answers):
            if number % 5 < 3:
                assert isinstance(answer, HostUnavailable | ServerUnavailable), answer
                assert "tables 'item': host" in str(answer)
            else:
                assert_same(answer, expected[number % 5 - 3])
        assert isinstance(at_once([partial(client.rows, "item", [1])])[0], ServerUnavailable)
        np.testing.assert_array_equal(client.rows("word", [3]), before["words"].values[:1])
        partial_answer = engine.lookup(whole)
        assert not partial_answer["recent"].values.any()
        assert before["recent"].values.all()
        assert_same({"words": partial_answer["words"]}, {"words": before["words"]})


def assert_same(answer: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert answer.keys() == expected.keys()
    for name, value in answer.items():
        pairs = [value.values, expected[name].values] if isinstance(value, JaggedRows) else [value, expected[name]]
        np.testing.assert_array_equal(*pairs)
