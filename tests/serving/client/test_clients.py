"""Our clients against a real server: TLS, secrets, shared memory, asyncio."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from export import export_model
from serving.client import Answer, AsyncLookupClient, LookupClient, Retries, Tls
from serving.engine import Engine
from serving.errors import InvalidRequest, ServerUnavailable, ServingError
from serving.server import Access, Server, ServerTls, run_server
from tests.support.certificates import write_certificates
from tests.support.models import MIXED, SUM, collection, random_bags
from tests.support.servers import FREE, wait_for_answer

pytestmark = pytest.mark.usefixtures("quick_reload")

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


def test_mutual_tls_and_a_secret(secured: Server, pems: Path) -> None:
    with LookupClient(secured.grpc, "m", 30, tls=tls(pems), metadata=KNOWN) as client:
        assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)

    async def run() -> Answer:
        async with AsyncLookupClient(secured.grpc, "m", 30, tls=tls(pems), metadata=lambda: KNOWN) as client:
            return await client.lookup({"x": [[1]]})

    assert asyncio.run(run())["x"].shape == (1, 8)


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
def test_who_should_not_get_in_does_not(
    secured: Server, pems: Path, changes: dict[str, Path | str | None], metadata: dict[str, str]
) -> None:
    with (
        LookupClient(
            secured.grpc, "m", 60, tls=tls(pems, **changes), metadata=metadata, retries=Retries(attempts=1)
        ) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.lookup({"x": [[1]]})


def test_in_the_clear_nothing_comes_of_it(secured: Server) -> None:
    with (
        LookupClient(secured.grpc, "m", 60, metadata=KNOWN, retries=Retries(attempts=1)) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.lookup({"x": [[1]]})


def test_a_server_that_asks_for_no_certificate_is_spoken_to_with_a_root_alone(pems: Path, one_model: Path) -> None:
    access = Access(tls=ServerTls(certificate=pems / "server.pem", private_key=pems / "server.key"))
    alone = Tls(root_certificates=pems / "root.pem", server_name="lookup.test")
    with (
        run_server(one_model, FREE, access=access, log=pems / "log") as server,
        LookupClient(server.grpc, "m", 30, tls=alone) as client,
    ):
        assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)


# --- shared memory


def regions() -> set[str]:
    """Of clients; servers have others beside them."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("tbe-") and "tbe-serving-" not in name}


def test_shared_memory_gives_the_same_answers(server: Server) -> None:
    random = np.random.default_rng(0)
    requests = [random_bags(random, MIXED, samples) for samples in (1, 3, 0, 500)]
    before = regions()
    with (
        LookupClient(server.grpc, "mixed", 30) as over_grpc,
        LookupClient(server.grpc, "mixed", 30, shared_memory=True) as client,
    ):
        answers = [client.lookup(request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            expected = over_grpc.lookup(request)
            assert answer.version == expected.version
            for name, rows in expected.items():
                np.testing.assert_array_equal(answer[name], rows)
                assert not answer[name].flags.writeable
        assert len(regions() - before) == len(requests) - 1  # each still looks into its own; no samples need none
        del answer, answers
        for request in requests:
            client.lookup(request)
        assert len(regions() - before) == len(requests) - 1  # and they are used again
    assert regions() == before


def test_shared_memory_serves_many_lookups_of_one_event_loop(server: Server) -> None:
    random = np.random.default_rng(2)
    requests = [random_bags(random, MIXED, samples) for samples in range(1, 33)]
    before = regions()

    async def run() -> list[Answer]:
        async with AsyncLookupClient(server.grpc, "mixed", 30, shared_memory=True) as client:
            return await asyncio.gather(*(client.lookup(request) for request in requests))

    answers = asyncio.run(run())
    with LookupClient(server.grpc, "mixed", 30) as over_grpc:
        for request, answer in zip(requests, answers, strict=True):
            for name, rows in over_grpc.lookup(request).items():
                np.testing.assert_array_equal(answer[name], rows)
    del answer, answers
    assert regions() == before


def test_answers_in_shared_memory_do_not_change_under_their_reader(server: Server) -> None:
    random = np.random.default_rng(1)
    requests = [random_bags(random, MIXED, 10) for _ in range(40)]
    with LookupClient(server.grpc, "half", 30) as over_grpc:
        expected = [over_grpc.lookup(request) for request in requests]
    with (
        LookupClient(server.grpc, "half", 30, shared_memory=True) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        for answer, rows in zip(list(pool.map(client.lookup, requests)), expected, strict=True):
            for name in rows:
                assert answer[name].dtype == np.float16
                np.testing.assert_array_equal(answer[name], rows[name])
        with pytest.raises(InvalidRequest, match="feature 'genres': expected an id"):
            client.lookup({"genres": [[20]]})


def test_shared_memory_outlives_a_server(tmp_path: Path) -> None:
    export_model(collection(SUM), tmp_path / "r", "m")
    access = Access(allow=("shared-memory",))
    with run_server(tmp_path / "r", FREE, access=access, log=tmp_path / "log") as server:
        port = int(server.grpc.rpartition(":")[2])
        client = LookupClient(server.grpc, "m", 30, shared_memory=True)
        before = client.lookup({"x": [[1]]})["x"].copy()
    ports = type(FREE)(grpc=port, http=0, metrics=0)
    with run_server(tmp_path / "r", ports, access=access, log=tmp_path / "log"):
        wait_for_answer(client)
        np.testing.assert_array_equal(client.lookup({"x": [[1]]})["x"], before)
        client.close()
    assert regions() == set()


def test_shared_memory_where_the_server_does_not_allow_it(tmp_path: Path) -> None:
    export_model(collection(SUM), tmp_path / "r", "m")
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client:
            client.lookup({"x": [[1]]})
        with (
            LookupClient(server.grpc, "m", 30, shared_memory=True, retries=Retries(attempts=1)) as client,
            pytest.raises(
                ServingError,
                match=r"shared memory needs a server on this host that allows it .*--allow shared-memory",
            ),
        ):
            client.lookup({"x": [[1]]})
    assert regions() == set()


def test_an_async_client_answers_as_the_other(server: Server) -> None:
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


def test_ids_alone_and_a_kjt_of_int32_are_answered_as_bags_are(server: Server, mixed: Path) -> None:
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
