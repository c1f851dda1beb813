"""Position weights: TorchRec's FeatureProcessedEmbeddingBagCollection, run eagerly on a KJT, is the oracle."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from export import ExportConfig, IdPolicy, Sharding, WeightDtype, export_model
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import InvalidRequest
from tests.support.commands import tbe_export
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.long_cases import fewer_examples, one_in
from tests.support.lookups import lookup_async
from tests.support.models import Bags, Spec, collection, flat
from tests.support.position_weights import LONGEST, positioned
from tests.support.servers import at_once, metric, running

FP32 = ExportConfig(dtype={"*": WeightDtype.FP32})
ROWS = {"user_id": 500, "item_id": 300, "recent": 300, "words": 1000}


def kjt_of(bags: Mapping[str, Bags]) -> KeyedJaggedTensor:
    values, lengths = flat(bags)
    return KeyedJaggedTensor.from_lengths_sync(list(bags), torch.from_numpy(values), torch.from_numpy(lengths))


def bags_of(
    random: np.random.Generator, samples: int, rows: Mapping[str, int] = ROWS, longest: Mapping[str, int] = LONGEST
) -> dict[str, Bags]:
    return {
        key: [
            random.integers(0, row_count, size).tolist()
            for size in random.integers(0, longest.get(key, 9) + 1, samples)
        ]
        for key, row_count in rows.items()
    }


def assert_right(answer: Any, module: FeatureProcessedEmbeddingBagCollection, bags: Mapping[str, Bags]) -> None:
    if not any(bags.values()):  # without samples, TorchRec's KJT cannot be taken apart
        assert {len(rows) for rows in answer.values()} == {0}
        return
    expected = module(kjt_of(bags)).to_dict()
    assert answer.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_allclose(answer[name], rows.detach(), rtol=1e-6, atol=4e-6, err_msg=name)


@fewer_examples
@given(data=st.data())
def test_random_modules_answer_as_torchrec_runs_them(data: st.DataObject, tmp_path_factory: Any) -> None:
    keys = ("a", "b", "c", "d")
    specs = [
        Spec(
            f"t{number}",
            data.draw(st.integers(1, 60), label="rows"),
            4 * data.draw(st.integers(1, 4)),
            "SUM",
            tuple(data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True), label="keys")),
        )
        for number in range(data.draw(st.integers(1, 3), label="tables"))
    ]
    rows = {key: min(spec.rows for spec in specs if key in spec.features) for spec in specs for key in spec.features}
    by_key = data.draw(st.booleans(), label="a module for each key")
    longest = {key: data.draw(st.integers(1, 12)) for key in rows if by_key or data.draw(st.booleans())}
    module = positioned(specs, longest, by_key=by_key, seed=data.draw(st.integers(0, 1000)))
    ranks = data.draw(st.integers(1, 3), label="ranks")
    kind = data.draw(st.sampled_from(["row_wise", "table_wise", "column_wise", "data_parallel"]))
    kind = "table_wise" if kind == "row_wise" and min(spec.rows for spec in specs) < ranks else kind
    sharding = Sharding(ranks=ranks, types={"*": kind}) if ranks > 1 else Sharding()
    config = ExportConfig(dtype=FP32.dtype, sharding=sharding)
    bundle = export_model(module, tmp_path_factory.mktemp("random") / "r", "m", config)
    engine = Engine.open(bundle)
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for samples in (0, 1, 5):
        bags = bags_of(random, samples, rows, longest)
        assert_right(engine.lookup(bags), module, bags)
        assert_right(engine.lookup(kjt_of(bags)), module, bags)
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)


@pytest.mark.parametrize("by_key", one_in(2, [True, False]), ids=["a module for each key", "one for some"])
def test_every_dtype_is_compared_with_the_module(by_key: bool, tmp_path: Path) -> None:
    module = positioned(by_key=by_key, longest=LONGEST if by_key else {"recent": 7})
    dtype = {"user": WeightDtype.INT8, "item": WeightDtype.INT4, "word": WeightDtype.INT2}
    bundle = export_model(module, tmp_path / "r", "m", ExportConfig(dtype=dtype))
    manifest = open_bundle(bundle).manifest
    assert manifest.requires == (Capability.POSITION_WEIGHTS,)
    assert not manifest.weighted
    assert manifest.longest_bags == (LONGEST if by_key else {"recent": 7})
    assert all(parity.trained is not None and parity.trained.cosine > 0.6 for parity in manifest.parity)
    assert tbe_export("verify", str(bundle)).exit_code == 0
    assert "·p: ids are weighted by their position in the bag" in tbe_export("inspect", str(bundle)).stdout


def test_positions_are_those_of_the_request_where_ids_are_dropped(tmp_path: Path) -> None:
    """As a module would weigh them: before anything is looked up. A bag is as long as it was sent."""
    policies = {"item": IdPolicy.ZERO, "word": IdPolicy.MODULO}
    module = positioned()
    engine = Engine.open(
        export_model(module, tmp_path / "r", "m", ExportConfig(dtype=FP32.dtype, id_policy=policies))
    )
    answer = engine.lookup({"item_id": [[-1, 7, 300, 9]], "words": [[5, -1, 1002]]})
    items, words = (
        module._embedding_bag_collection.embedding_bags[name].weight.detach() for name in ("item", "word")
    )
    by_position = {key: processor.position_weight.detach() for key, processor in module._feature_processors.items()}
    weights = by_position["item_id"]
    np.testing.assert_allclose(answer["item_id"][0], weights[1] * items[7] + weights[3] * items[9], atol=1e-6)
    expected = sum(weight * words[row] for weight, row in zip(by_position["words"], (5, 999, 2), strict=False))
    np.testing.assert_allclose(answer["words"][0], expected, atol=1e-6)
    with pytest.raises(InvalidRequest, match="feature 'item_id': expected at most 4 ids in a bag"):
        engine.lookup({"item_id": [[-1, -1, -1, -1, 3]]})


def test_position_weights_work_beside_weighted_ids(tmp_path: Path) -> None:
    """What is sent for a key of position weights is not used: the module does not, either."""
    specs = [Spec("own", 40, 8, "SUM", ("x", "recent"))]
    module = torch.nn.ModuleDict({"positioned": positioned(), "own": collection(specs, weighted=True)})
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    assert engine.bundle.manifest.weighted_keys == ("recent", "x")
    bags = bags_of(np.random.default_rng(0), 6, {**ROWS, "recent": 40, "x": 40})
    plain = kjt_of(bags)
    kjt = KeyedJaggedTensor(
        plain.keys(), plain.values(), lengths=plain.lengths(), weights=torch.randn(plain.values().numel())
    )
    answer, expected = engine.lookup(kjt), module["positioned"](kjt).to_dict() | module["own"](kjt).to_dict()
    for name, rows in answer.items():
        right = expected["recent" if name == "recent@own" else name].detach()
        np.testing.assert_allclose(rows, right, rtol=1e-6, atol=4e-6, err_msg=name)


def check_served(lookup: Callable[[Any], Any], module: Any) -> None:
    """Requests that come together; bags that are too long are refused, and hurt nobody."""
    requests = [bags_of(np.random.default_rng(seed), seed % 9) for seed in range(24)]
    some = {key: requests[5][key] for key in ("words", "item_id")}
    long = {"item_id": [[1], [1, 2, 3, 4, 5]]}
    answers = at_once([partial(lookup, request) for request in [*requests, some, long, long]])
    for request, answer in zip(requests, answers[:24], strict=True):
        assert_right(answer, module, request)
    whole = module(kjt_of(requests[5])).to_dict()
    for name, rows in answers[24].items():
        np.testing.assert_allclose(rows, whole[name].detach(), rtol=1e-6, atol=4e-6)
    for refused in answers[25:]:
        assert isinstance(refused, InvalidRequest)
        message = "feature 'item_id': expected at most 4 ids in a bag, one for each of its position weights, got 5"
        assert message in str(refused)


@pytest.mark.long
def test_merged_requests_are_answered_like_torchrec(tmp_path: Path) -> None:
    module = positioned()
    export_model(module, tmp_path / "r", "m", FP32)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        assert client.info().weighted == ()
        check_served(client.lookup, module)
        assert metric(server, "tbe_calls_total") < 27
        with pytest.raises(InvalidRequest, match="expected no weights: this model is not weighted"):
            client.lookup({"user_id": ([1], [1], [1.0])})
        bags = bags_of(np.random.default_rng(7), 3)
        assert_right(lookup_async(server.grpc, bags, 60), module, bags)


@pytest.mark.long
def test_a_router_makes_the_position_weights(tmp_path: Path) -> None:
    """The router makes the weights. Hosts are sent them, as of any weighted table."""
    module = positioned()
    sharding = Sharding(
        ranks=2, ranks_per_host=1, types={"item": "row_wise", "word": "column_wise", "user": "data_parallel"}
    )
    router = export_hosts(tmp_path, module, ExportConfig(dtype=FP32.dtype, sharding=sharding))
    for host in open_bundle(router).manifest.hosts:
        part = open_bundle(router.parents[1] / host.model / str(host.version)).manifest
        assert part.weighted
        assert set(part.requires) == {Capability.HOSTS, Capability.INT32_IDS}
    with (
        fleet(tmp_path, router) as served,
        LookupClient(served.router.grpc, MODEL, 60) as client,
    ):
        check_served(client.lookup, module)
        with Engine.open(served.bundle, served.hosts) as engine:
            bags = bags_of(np.random.default_rng(7), 5)
            assert_right(engine.lookup(bags), module, bags)
