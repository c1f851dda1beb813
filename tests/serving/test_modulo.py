"""Id policy `modulo`: every int64 is an id. Served, merged, over ranks and hosts; numpy is the oracle."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import ExportConfig, IdPolicy, Sharding, WeightDtype, export_model
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import InvalidRequest
from tests.support import oracle
from tests.support.commands import tbe_export
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.models import MIXED, Bags, Spec, collection, float_tables
from tests.support.servers import at_once, metric, running

EXTREMES = [-(2**63), -1, 2**63 - 1, 2**31, -(2**40)]
# `genre` has the policy `error`, `item` the policy `zero`.
MODULO = ("user", "word")


def config(sharding: Sharding | None = None) -> ExportConfig:
    policies = {"item": IdPolicy.ZERO} | dict.fromkeys(MODULO, IdPolicy.MODULO)
    return ExportConfig(dtype={"*": WeightDtype.FP32}, id_policy=policies, sharding=sharding or Sharding())


def hashed(random: np.random.Generator, samples: int) -> dict[str, Bags]:
    """Bags of any int64 where the policy is `modulo`."""

    def bags(spec: Spec) -> Bags:
        of_any_size = [random.integers(-(2**63), 2**63 - 1, size).tolist() for size in random.integers(0, 6, samples)]
        in_table = [random.integers(0, spec.rows, size).tolist() for size in random.integers(0, 6, samples)]
        of_any_size[0] += EXTREMES
        return of_any_size if spec.name in MODULO else in_table

    return {feature: bags(spec) for spec in MIXED for feature in spec.features}


def assert_right(answer: Any, request: dict[str, Bags]) -> None:
    tables = float_tables(collection(MIXED))
    for spec in MIXED:
        for feature in spec.features:
            rows = [[id_ % spec.rows for id_ in bag] for bag in request[feature]]
            expected = oracle.pool(tables[spec.name], rows, spec.pooling)
            np.testing.assert_allclose(answer[feature], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(Sharding(), id="one rank"),
        pytest.param(Sharding(ranks=3, types={"*": "row_wise"}), id="row-wise"),
        pytest.param(Sharding(ranks=2, types={"*": "column_wise"}), id="column-wise"),
    ],
)
def test_in_this_process(sharding: Sharding, tmp_path: Path) -> None:
    bundle = export_model(collection(MIXED), tmp_path / "r", "m", config(sharding))
    assert open_bundle(bundle).manifest.requires == (Capability.MODULO,)
    engine = Engine.open(bundle)
    for seed in range(5):
        request = hashed(np.random.default_rng(seed), 7)
        assert_right(engine.lookup(request), request)
    assert tbe_export("verify", str(bundle)).exit_code == 0
    assert "modulo" in tbe_export("inspect", str(bundle)).stdout


def check_served(lookup: Callable[[Any], Any]) -> None:
    """Requests that come together, some of them wrong."""
    requests = [hashed(np.random.default_rng(seed), 1 + seed % 9) for seed in range(24)]
    bad = hashed(np.random.default_rng(99), 2) | {"genres": [[20], []]}
    answers = at_once([partial(lookup, request) for request in [*requests, bad, bad]])
    for request, answer in zip(requests, answers[:-2], strict=True):
        assert_right(answer, request)
    for refused in answers[-2:]:
        assert isinstance(refused, InvalidRequest)
        assert "feature 'genres': expected an id in [0, 20), got 20" in str(refused)


@pytest.mark.long
def test_served_and_merged(tmp_path: Path) -> None:
    export_model(collection(MIXED), tmp_path / "r", "m", config())
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        check_served(client.lookup)
        assert metric(server, "tbe_calls_total") < 26
        # They are ids like any other.
        assert metric(server, "tbe_ids_outside_total", table="user") == 0
        assert metric(server, "tbe_ids_outside_total", table="genre") == 2


@pytest.mark.long
def test_over_hosts(tmp_path: Path) -> None:
    """The router applies it before it splits: hosts get rows of their shards, by INT32."""
    sharding = Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise", "genre": "data_parallel"})
    router = export_hosts(tmp_path, collection(MIXED), config(sharding))
    assert set(open_bundle(router).manifest.requires) == {Capability.HOSTS, Capability.MODULO}
    for host in open_bundle(router).manifest.hosts:
        part = open_bundle(router.parents[1] / host.model / str(host.version)).manifest
        assert set(part.requires) == {Capability.HOSTS, Capability.INT32_IDS}
        assert {table.id_policy for table in part.tables} == {IdPolicy.ERROR}
    with (
        fleet(tmp_path, router) as served,
        LookupClient(served.router.grpc, MODEL, 60) as client,
    ):
        check_served(client.lookup)
        with Engine.open(served.bundle, served.hosts) as engine:
            request = hashed(np.random.default_rng(7), 5)
            assert_right(engine.lookup(request), request)
