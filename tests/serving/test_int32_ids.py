"""Models whose requests have INT32 ids: half the bytes. Served by a real server, from a router too."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from torchrec import KeyedJaggedTensor
from tritonclient.utils import InferenceServerException

from export import ExportConfig, IdDtype, IdPolicy, Sharding, export_model
from export.errors import PublishError
from export.pipeline import plan_model
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.client import AsyncLookupClient, LookupClient
from serving.engine import Engine
from serving.errors import ConfigurationError, InvalidRequest
from tests.support.bundle_reader import Reader
from tests.support.commands import TRAINED, tbe_export
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.models import SUM, Spec, collection
from tests.support.servers import running

INT32 = ExportConfig(id_dtype=IdDtype.INT32, id_policy={"b": IdPolicy.MODULO})
BAGS = {"x": [[3, 5], []], "z": [[-1], [2**31 - 1, 4]], "y": [[7], [49]]}
FORMS: list[Any] = [
    BAGS,
    {
        key: (np.array([id_ for bag in bags for id_ in bag], np.int32), [len(bag) for bag in bags])
        for key, bags in BAGS.items()
    },
    KeyedJaggedTensor.from_lengths_sync(
        list(BAGS),
        torch.tensor([3, 5, -1, 2**31 - 1, 4, 7, 49], dtype=torch.int32),
        torch.tensor([2, 0, 1, 2, 1, 1], dtype=torch.int32),
    ),
]


def assert_answers(address: str, model: str, engine: Engine) -> None:
    async def run() -> list[Any]:
        async with AsyncLookupClient(address, model, 60) as client:
            return [await client.lookup(form) for form in FORMS]

    expected = engine.lookup(BAGS)
    with LookupClient(address, model, 60) as client:
        answers = [*map(client.lookup, FORMS), *asyncio.run(run())]
        with pytest.raises(InvalidRequest, match="values: expected ids of int32, got 1 to 2147483648"):
            client.lookup({"x": [[1, 2**31]]})
    for answer in answers:
        for name, rows in expected.items():
            np.testing.assert_array_equal(answer[name], rows)


def test_clients_send_int32_for_any_input(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m", INT32)
    wide = Engine.open(export_model(collection(SUM), tmp_path / "wide", "m", ExportConfig(id_policy=INT32.id_policy)))
    manifest = open_bundle(bundle).manifest
    assert (manifest.requires, manifest.id_dtype) == ((Capability.INT32_IDS, Capability.MODULO), IdDtype.INT32)
    assert manifest.schema_digest == Reader(bundle).digest("schema_digest") != wide.bundle.manifest.schema_digest
    with running(tmp_path / "r") as server:
        assert_answers(server.grpc, "m", wide)
        with triton.InferenceServerClient(server.grpc) as client:
            assert raw(client, np.int32).shape == (1, 1, 28)
            with pytest.raises(InferenceServerException, match="INT64"):
                raw(client, np.int64)


def raw(client: Any, dtype: type[np.signedinteger[Any]]) -> Any:
    """One sample with a bag of one id for each key, as any client of the protocol asks."""
    inputs = []
    for name, array in (("values", np.array([[1, 2, 3]], dtype)), ("lengths", np.ones((1, 3), np.int32))):
        inputs.append(triton.InferInput(name, array.shape, {4: "INT32", 8: "INT64"}[array.itemsize]))
        inputs[-1].set_data_from_numpy(array)
    return client.infer("m", inputs).as_numpy("embeddings")


@pytest.mark.long
def test_a_router_takes_int32(tmp_path: Path) -> None:
    sharding = Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"})
    config = ExportConfig(id_dtype=IdDtype.INT32, id_policy=INT32.id_policy, sharding=sharding)
    router = export_hosts(tmp_path, collection(SUM), config)
    one = Engine.open(export_model(collection(SUM), tmp_path / "one", "m", ExportConfig(id_policy=INT32.id_policy)))
    with fleet(tmp_path, router) as served:
        with LookupClient(served.router.grpc, MODEL, 60) as client:
            assert client.info().ids_dtype == np.int32
        assert_answers(served.router.grpc, MODEL, one)


def test_a_router_with_int32_says_that_it_requires_it(tmp_path: Path) -> None:
    sharding = Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"})
    router = export_hosts(tmp_path, collection(SUM), ExportConfig(id_dtype=IdDtype.INT32, sharding=sharding))
    assert open_bundle(router).manifest.requires == (Capability.HOSTS, Capability.INT32_IDS)


def test_versions_of_one_model_take_ids_of_one_dtype(tmp_path: Path) -> None:
    export_model(collection(SUM), tmp_path / "r", "m")
    with pytest.raises(PublishError, match=r"expected the schema of the versions already there .* INT32 ids"):
        export_model(collection(SUM), tmp_path / "r", "m", INT32)


def test_a_table_of_more_rows_than_int32_counts_is_refused() -> None:
    with torch.device("meta"):
        module = collection([Spec("large", 2**31 + 1, 8, "SUM", ("x",))])
    with pytest.raises(ConfigurationError, match="id_dtype: table 'large' has 2147483649 rows"):
        plan_model(module, ExportConfig(id_dtype=IdDtype.INT32))


def test_the_id_dtype_option_sets_int32(tmp_path: Path) -> None:
    export = ("model", *TRAINED, "--repository", str(tmp_path / "r"), "--name", "m")
    done = tbe_export(*export, "--id-dtype", "int32")
    assert done.exit_code == 0, done.stderr
    assert open_bundle(tmp_path / "r" / "m" / "1").manifest.id_dtype is IdDtype.INT32
    refused = tbe_export(*export, "--id-dtype", "int8")
    assert refused.exit_code == 1
    assert "--id-dtype: expected one of int64, int32, got 'int8'" in refused.stderr
