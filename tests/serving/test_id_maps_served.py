"""Raw ids, from a server, and over hosts."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import ExportConfig, Sharding, export_model
from serving.bundle.id_maps import ID_MAPS_FILE
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import InvalidRequest
from tests.serving.test_id_maps import BOTH, FP32
from tests.support.commands import tbe_export
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.long_cases import one_in
from tests.support.lookups import lookup_async
from tests.support.managed_collision import KEYS, assert_equal, assert_right, bags_of, managed, right
from tests.support.models import Bags, Spec
from tests.support.servers import at_once, metric, running


def check_served(lookup: Callable[[Any], Any], module: Any) -> None:
    """Valid requests that are sent together with an invalid one get the right answers."""
    requests = [bags_of(np.random.default_rng(seed), seed % 9) for seed in range(24)]
    some = {key: requests[5][key] for key in ("words", "item_id")}
    invalid = {"unknown": [[1]]}
    answers = at_once([partial(lookup, request) for request in [*requests, some, invalid]])
    for request, answer in zip(requests, answers[:24], strict=True):
        assert_right(answer, module, request)
    whole = right(module, requests[5])
    for name, answer in answers[24].items():
        assert_equal(answer, whole[name], name)
    assert isinstance(answers[25], InvalidRequest)


def check_rows(rows: Callable[[str, Any], Any], module: Any) -> None:
    """Rows of a table, by raw ids: those of bags of one id."""
    ids = [id_ for bag in bags_of(np.random.default_rng(11), 5)["user_id"] for id_ in bag]
    bags: dict[str, Bags] = {key: [[]] * len(ids) for key in KEYS}
    expected = right(module, bags | {"user_id": [[id_] for id_ in ids]})["user_id"]
    expected = expected if isinstance(expected, torch.Tensor) else expected.values()
    np.testing.assert_array_equal(rows("user", ids), expected)


@pytest.mark.parametrize("specs", one_in(2, BOTH))
def test_served_and_merged(specs: Several[Spec], tmp_path: Path) -> None:
    module = managed(specs)
    export_model(module, tmp_path / "r", "m", FP32)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        check_served(client.lookup, module)
        assert metric(server, "tbe_calls_total") < 26
        check_rows(client.rows, module)
        assert metric(server, "tbe_ids_outside_total", table="user") == 0
        bags = bags_of(np.random.default_rng(7), 3)
        assert_right(lookup_async(server.grpc, bags, 60), module, bags)


@pytest.mark.long
@pytest.mark.parametrize("specs", BOTH)
def test_over_hosts(specs: Several[Spec], tmp_path: Path) -> None:
    """The router remaps before it splits: hosts get rows of their shards, and have no map."""
    module = managed(specs)
    sharding = Sharding(
        ranks=2, ranks_per_host=1, types={"item": "row_wise", "word": "column_wise", "user": "data_parallel"}
    )
    router = export_hosts(tmp_path, module, ExportConfig(dtype=FP32.dtype, sharding=sharding))
    assert set(open_bundle(router).manifest.requires) - {Capability.SEQUENCES} == {
        Capability.HOSTS,
        Capability.ID_MAPS,
    }
    for host in open_bundle(router).manifest.hosts:
        part = open_bundle(router.parents[1] / host.model / str(host.version)).manifest
        assert set(part.requires) == {Capability.HOSTS, Capability.INT32_IDS}
        assert ID_MAPS_FILE not in part.files
        assert all(table.id_map is None for table in part.tables)
    assert tbe_export("verify", str(router)).exit_code == 0
    with (
        fleet(tmp_path, router) as served,
        LookupClient(served.router.grpc, MODEL, 60) as client,
    ):
        check_served(client.lookup, module)
        check_rows(client.rows, module)
        with Engine.open(served.bundle, served.hosts) as engine:
            bags = bags_of(np.random.default_rng(7), 5)
            assert_right(engine.lookup(bags), module, bags)
