"""Our clients against a real server: TLS, secrets, shared memory, asyncio."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shared_memory
from torchrec import KeyedJaggedTensor
from tritonclient.utils import InferenceServerException

from export import export_model
from serving.client import Answer, AsyncLookupClient, LookupClient, Retries, Tls
from serving.engine import Engine
from serving.errors import ServerUnavailable
from serving.server import Access, Server, ServerTls, run_server
from tests.support.certificates import write_certificates
from tests.support.host_faults import until
from tests.support.models import MIXED, SUM, collection, flat, random_bags
from tests.support.servers import FREE

SECRET = "tbe=let-me-in"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root.pem, and key and chain of a server and of a client."""
    return write_certificates(tmp_path_factory.mktemp("pems"), server="lookup.test", client="client.test")


@pytest.fixture(scope="module")
def secured(pems: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Mutual TLS, and lookups only for those who know the secret."""
    folder = tmp_path_factory.mktemp("secured")
    export_model(collection(SUM), folder / "r", "m")
    certificates = ServerTls(
        certificate=pems / "server.pem", private_key=pems / "server.key", client_root=pems / "root.pem"
    )
    options = (f"--grpc-restricted-protocol=inference:{SECRET}",)
    access = Access(tls=certificates)
    with run_server(folder / "r", FREE, access=access, log=folder / "log", options=options) as server:
        yield server


def tls(pems: Path, **changes: Path | str | None) -> Tls:
    arguments: dict[str, Path | str | None] = {
        "root_certificates": pems / "root.pem",
        "certificate_chain": pems / "client.pem",
        "private_key": pems / "client.key",
        "server_name": "lookup.test",
    }
    return Tls(**(arguments | changes))  # type: ignore[arg-type]


KNOWN = {"triton-grpc-protocol-tbe": "let-me-in"}


def test_clients_connect_with_mutual_tls_and_a_secret(secured: Server, pems: Path) -> None:
    with LookupClient(secured.grpc, "m", 30, tls=tls(pems), metadata=KNOWN) as client:
        assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)

    async def run() -> Answer:
        async with AsyncLookupClient(secured.grpc, "m", 30, tls=tls(pems), metadata=lambda: KNOWN) as client:
            return await client.lookup({"x": [[1]]})

    assert asyncio.run(run())["x"].shape == (1, 8)


@pytest.mark.promise("With mutual TLS a client without a certificate is refused")
@pytest.mark.parametrize(
    ("changes", "metadata"),
    [
        pytest.param({"certificate_chain": None, "private_key": None}, KNOWN, id="no certificate"),
        pytest.param({"root_certificates": None}, KNOWN, id="a root that signed nothing"),
        pytest.param({"server_name": "other.test"}, KNOWN, id="another server's name"),
        pytest.param({}, {}, id="no secret"),
        pytest.param({}, {"triton-grpc-protocol-tbe": "guess"}, id="a wrong secret"),
    ],
)
def test_unauthenticated_clients_are_refused(
    secured: Server, pems: Path, changes: dict[str, Path | str | None], metadata: dict[str, str]
) -> None:
    with (
        LookupClient(
            secured.grpc, "m", 60, tls=tls(pems, **changes), metadata=metadata, retries=Retries(attempts=1)
        ) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.lookup({"x": [[1]]})


def test_a_client_without_tls_is_refused(secured: Server) -> None:
    with (
        LookupClient(secured.grpc, "m", 60, metadata=KNOWN, retries=Retries(attempts=1)) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.lookup({"x": [[1]]})


def test_a_root_certificate_is_enough_without_mutual_tls(pems: Path, one_model: Path) -> None:
    access = Access(tls=ServerTls(certificate=pems / "server.pem", private_key=pems / "server.key"))
    alone = Tls(root_certificates=pems / "root.pem", server_name="lookup.test")
    with (
        run_server(one_model, FREE, access=access, log=pems / "log") as server,
        LookupClient(server.grpc, "m", 30, tls=alone) as client,
    ):
        assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)


# --- shared memory


def is_unregistered(client: triton.InferenceServerClient) -> bool:
    with suppress(InferenceServerException):  # it is in use
        client.unregister_system_shared_memory("answers")
        return True
    return False


def test_any_client_takes_answers_through_shared_memory(server: Server) -> None:
    bags = random_bags(np.random.default_rng(0), MIXED, 5)
    with LookupClient(server.grpc, "mixed", 30) as client:
        width = sum(client.info().dims.values())
        expected = client.lookup(bags)
    values, lengths = flat(bags)
    inputs = [
        triton.InferInput("values", [1, values.size], "INT64").set_data_from_numpy(values[np.newaxis]),
        triton.InferInput("lengths", [1, lengths.size], "INT32").set_data_from_numpy(lengths[np.newaxis]),
    ]
    size_bytes = 5 * width * 4
    region = shared_memory.create_shared_memory_region("answers", f"/tbe-test-{os.getpid()}", size_bytes)
    try:
        with triton.InferenceServerClient(server.grpc) as client:
            client.register_system_shared_memory("answers", f"/tbe-test-{os.getpid()}", size_bytes)
            output = triton.InferRequestedOutput("embeddings")
            output.set_shared_memory("answers", size_bytes)
            client.infer("mixed", inputs, outputs=[output], parameters={"features": ",".join(bags)})
            until(lambda: is_unregistered(client), "the server lets go of it")  # which may be after the answer
        rows = shared_memory.get_contents_as_numpy(region, np.float32, [5, width])
        np.testing.assert_array_equal(rows, np.concatenate([*expected.values()], axis=1))
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_both_clients_give_equal_answers(server: Server) -> None:
    random = np.random.default_rng(2)
    requests = [random_bags(random, MIXED, int(random.integers(0, 20))) for _ in range(50)]
    with LookupClient(server.grpc, "mixed", 30) as client:
        expected = [client.lookup(request) for request in requests]

    async def run() -> list[Answer]:
        async with AsyncLookupClient(server.grpc, "mixed", 30) as client:
            return await asyncio.gather(*(client.lookup(request) for request in requests))

    for answer, rows in zip(asyncio.run(run()), expected, strict=True):
        for name in rows:
            np.testing.assert_array_equal(answer[name], rows[name])


def test_answers_in_fp16_stay_fp16(server: Server, repository: Path) -> None:
    bags = random_bags(np.random.default_rng(3), MIXED, 10)
    with LookupClient(server.grpc, "half", 30) as client:
        answer = client.lookup(bags)
    for name, rows in Engine.open(repository / "half" / "1").lookup(bags).items():
        assert answer[name].dtype == rows.dtype == np.float16
        np.testing.assert_array_equal(answer[name], rows)


def test_flat_ids_and_an_int32_kjt_are_answered_like_bags(server: Server, mixed: Path) -> None:
    """One id for each sample, and ids as many trainings have them: by both clients and in this process."""
    bags = {"user_id": [[3], [499], [0]], "genres": [[1, 2], [], [7]]}
    int32 = torch.tensor([3, 499, 0, 1, 2, 7], dtype=torch.int32)
    forms: list[Any] = [
        bags,
        {"user_id": [3, 499, 0], "genres": bags["genres"]},
        {"user_id": np.array([3, 499, 0], np.int32), "genres": bags["genres"]},
        KeyedJaggedTensor.from_lengths_sync(["user_id", "genres"], int32, torch.tensor([1, 1, 1, 2, 0, 1])),
    ]

    async def run() -> list[Answer]:
        async with AsyncLookupClient(server.grpc, "mixed", 30.0) as client:
            return [await client.lookup(form) for form in forms]

    expected = Engine.open(mixed).lookup(bags)
    with LookupClient(server.grpc, "mixed", 30.0) as client:
        answers = [*map(client.lookup, forms), *map(Engine.open(mixed).lookup, forms), *asyncio.run(run())]
    for answer in answers:
        assert list(answer) == list(bags)
        for name, rows in answer.items():
            np.testing.assert_array_equal(rows, expected[name])


def test_a_client_imports_fast_and_little() -> None:
    """What it imports; how long that takes is for `make bench` to say."""
    code = "import sys, serving.client; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in (
        "torch",
        "torchrec",
        "fbgemm_gpu",
        "pandas",
        "matplotlib",
        "scipy",
        "rich",
        "typer",
        "psutil",
        "cryptography",
    ):
        assert f"'{heavy}'" not in done.stdout


@pytest.mark.parametrize("kind", [LookupClient, AsyncLookupClient, Engine])
@pytest.mark.parametrize("method", ["lookup", "score", "stream"])
def test_help_of_client_methods_has_a_short_signature(kind: type, method: str) -> None:
    """A signature that can be read: the forms of ids alone take four thousand characters. Then a sentence."""
    assert len(str(inspect.signature(getattr(kind, method)))) < 500
    assert inspect.getdoc(getattr(kind, method))
