"""End to end: a real tritonserver, its real Python backend, real gRPC."""

import contextlib
import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import tritonclient.grpc as triton
from torchrec import KeyedJaggedTensor

from export import export_model
from serving.client import LookupClient
from serving.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ServerFailed,
    ServerFault,
    ServerUnavailable,
)
from serving.server import Access, Ports, Server, installation, run_server
from serving.server.ports import free_ports
from tests import oracle
from tests.models import MIXED, SUM, Bags, Spec, collection, flat, float_tables, random_bags, table_of
from tests.served.tools import (
    FREE,
    FREE_PORTS,
    at_once,
    held,
    lens,
    metric,
    raw_request,
    replace_model_py,
    row,
    start_tbe_serve,
    wait_for_execution,
    wait_for_pending,
)

FEATURES = list(table_of(MIXED))


@pytest.fixture
def client(server: Server) -> Iterator[LookupClient]:
    with LookupClient(server.grpc, "mixed", timeout_s=30) as client:
        yield client


def expected(bundle: Path, bags: dict[str, Bags]) -> dict[str, npt.NDArray[Any]]:
    tables = table_of(MIXED)
    return {
        name: oracle.pool(oracle.exported_table(bundle, tables[name].name), column, tables[name].pooling)
        for name, column in bags.items()
    }


# --- lookups


def test_served_answers_are_numpy_s_over_the_exported_bytes(client: LookupClient, mixed: Path) -> None:
    bags = random_bags(np.random.default_rng(0), MIXED, 100)
    answer = client.lookup(bags)
    assert list(answer) == FEATURES
    for name, rows in expected(mixed, bags).items():
        assert answer[name].dtype == np.float32
        np.testing.assert_allclose(answer[name], rows, rtol=1e-6, atol=1e-6)


def test_served_answers_are_the_float_tables_within_the_quantization_bound(server: Server) -> None:
    tables = float_tables(collection(SUM, weighted=True))
    bags = random_bags(np.random.default_rng(1), SUM, 50)
    request = {name: (*flat({name: column}), np.full(sum(map(len, column)), 0.5)) for name, column in bags.items()}
    with LookupClient(server.grpc, "weighted", timeout_s=30) as client:
        answer = client.lookup(request)
    for name, rows in answer.items():
        table = tables[table_of(SUM)[name].name]
        bound = oracle.row_range_bound(table, "INT8")[:, np.newaxis].repeat(table.shape[1], axis=1)
        error = np.abs(rows - 0.5 * oracle.pool(table, bags[name], "SUM"))
        assert (error <= 0.5 * oracle.pool(bound, bags[name], "SUM") + 1e-5).all()


def test_a_model_on_four_ranks_answers_what_it_answers_on_one(client: LookupClient, server: Server) -> None:
    random = np.random.default_rng(8)
    with LookupClient(server.grpc, "sharded", 30) as sharded:
        for features in (None, ["words", "genres"], ["recent_items"]):
            bags = random_bags(random, MIXED, 20, features, longest=30)
            expected = client.lookup(bags)
            for feature, rows in sharded.lookup(bags).items():
                np.testing.assert_allclose(rows, expected[feature], rtol=1e-5, atol=1e-5)


def test_lists_arrays_and_kjts_get_the_same_answer(client: LookupClient) -> None:
    bags = random_bags(np.random.default_rng(2), MIXED, 7)
    values, lengths = flat(bags)
    kjt = KeyedJaggedTensor.from_lengths_sync(list(bags), torch.from_numpy(values), torch.from_numpy(lengths))
    as_lists = client.lookup(bags)
    as_arrays = client.lookup({name: flat({name: column}) for name, column in bags.items()})
    as_kjt = client.lookup(kjt)
    for name in bags:
        np.testing.assert_array_equal(as_lists[name], as_arrays[name])
        np.testing.assert_array_equal(as_lists[name], as_kjt[name])


@pytest.mark.parametrize("features", [["genres"], ["words", "user_id"], list(reversed(FEATURES))])
def test_some_features_in_any_order(client: LookupClient, mixed: Path, features: list[str]) -> None:
    bags = random_bags(np.random.default_rng(3), MIXED, 9, features)
    answer = client.lookup(bags)
    assert list(answer) == features
    for name, rows in expected(mixed, bags).items():
        np.testing.assert_allclose(answer[name], rows, rtol=1e-6, atol=1e-6)


def test_no_samples_no_ids_and_one_sample(client: LookupClient) -> None:
    assert client.lookup({"genres": []})["genres"].shape == (0, 8)
    assert client.lookup({"genres": [[], []]})["genres"].tolist() == [[0] * 8] * 2
    assert client.lookup({"genres": [[3]]})["genres"].shape == (1, 8)


def test_fp16_out(server: Server) -> None:
    with LookupClient(server.grpc, "half", timeout_s=30) as client:
        assert client.lookup({"genres": [[3, 5]]})["genres"].dtype == np.float16


def test_a_large_request(client: LookupClient, mixed: Path) -> None:
    bags = random_bags(np.random.default_rng(4), MIXED, 20_000, ["item_id", "words"])
    answer = client.lookup(bags)
    for name, rows in expected(mixed, {name: column[:50] for name, column in bags.items()}).items():
        np.testing.assert_allclose(answer[name][:50], rows, rtol=1e-6, atol=1e-6)


def test_the_client_knows_features_and_dims_from_the_server(client: LookupClient) -> None:
    assert client.info().dims == {name: table_of(MIXED)[name].dim for name in FEATURES}
    assert client.info().weighted == ()


# --- many at once


def some_request(random: np.random.Generator) -> dict[str, Bags]:
    features = random.permutation(FEATURES)[: random.integers(1, 6)].tolist()
    return random_bags(random, MIXED, int(random.integers(0, 40)), features)


def test_64_different_requests_at_once_get_bit_for_bit_what_each_gets_alone(server: Server, gated: Path) -> None:
    random = np.random.default_rng(5)
    client = LookupClient(server.grpc, "gated", timeout_s=120)
    requests = [some_request(random) for _ in range(64)]
    alone = [client.lookup(request) for request in requests]
    calls = metric(server, "tbe_calls_total", model="gated")
    answered = metric(server, "tbe_requests_total", model="gated")
    for _ in range(3):
        with ThreadPoolExecutor(65) as pool:
            with held(gated):
                first = pool.submit(client.lookup, requests[0])
                wait_for_execution(gated)
                answers = [pool.submit(client.lookup, request) for request in requests]
                wait_for_pending(server, "gated", 64)
            together = [answer.result() for answer in answers]
            first.result()
        for one, other in zip(alone, together, strict=True):
            assert list(one) == list(other)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
    calls = metric(server, "tbe_calls_total", model="gated") - calls
    answered = metric(server, "tbe_requests_total", model="gated") - answered
    assert answered == 3 * 65
    assert calls == 3 * 2, f"{answered:g} requests took {calls:g} TBE calls: they were not merged"


BAD = {
    "id = rows": (row(0, 20), lens(1, 1), "genres", r"feature 'genres': expected an id in \[0, 20\), got 20 for sample 1"),
    "id = -1": (row(-1), lens(1), "user_id", r"feature 'user_id': .* got -1"),
    "id past int32": (row(2**32 + 5), lens(1), "user_id", r"feature 'user_id': .* got 4294967301"),
    "lengths that sum to less": (row(1, 2, 3), lens(1, 1), "user_id,genres", r"feature 'genres': .* got 3 ids for lengths that sum to 2"),
    "lengths that sum to more": (row(1), lens(1, 1), "user_id,genres", r"feature 'genres': expected its bags to take ids \[1, 2\)"),
    "negative length": (row(1), lens(2, -1), "user_id,genres", "feature 'genres': expected lengths >= 0, got -1 for sample 0"),
    "huge lengths": (row(1), lens(2**31 - 1, 2**31 - 1), "user_id,genres", "feature 'user_id': .* got 1 ids for lengths that sum to 4294967294"),
    "unknown feature": (row(1), lens(1), "no_such", "feature 'no_such': expected one of 'user_id'"),
    "feature twice": (row(1, 1), lens(1, 1), "genres,genres", "feature 'genres': expected each feature once, got it twice"),
    "empty features": (row(1), lens(1), "", "features: expected at least one of 'user_id'"),
    "features no text": (row(1), lens(1), 7, "parameter features: expected comma-separated names, got 7"),
    "lengths not divisible": (row(1), lens(1, 0, 0), "user_id,genres", r"lengths: expected a multiple of 2, .*\('user_id', 'genres'\), got 3"),
    "values of wrong dtype": (row(1, dtype=np.int32), lens(1), "user_id", "'values' data-type is 'INT32', but model 'mixed' expects 'INT64'"),
    "lengths of wrong dtype": (row(1), row(1), "user_id", "'lengths' data-type is 'INT64', but model 'mixed' expects 'INT32'"),
    "two rows": (np.ones((2, 1), np.int64), np.ones((2, 1), np.int32), "user_id", r"values: expected shape \[1, n\], got \[2, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_and_its_63_neighbours_are_answered(
    server: Server, client: LookupClient, bad: tuple[Any, Any, Any, str]
) -> None:
    values, lengths, features, message = bad
    request = random_bags(np.random.default_rng(6), MIXED, 3, ["user_id", "words"])
    alone = client.lookup(request)
    calls: list[Callable[[], Any]] = [lambda: client.lookup(request)] * 63
    calls.insert(30, lambda: raw_request(server, values, lengths, features))
    answers = at_once(calls)
    refusal = answers.pop(30)
    assert isinstance(refusal, triton.InferenceServerException)
    assert refusal.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(triton.InferenceServerException, match=message):
        raise refusal
    assert "Traceback" not in refusal.message()
    for answer in answers:
        for name in alone:
            np.testing.assert_array_equal(answer[name], alone[name])


def test_bad_requests_and_ids_left_out_are_counted(server: Server, client: LookupClient) -> None:
    rejected = metric(server, "tbe_rejected_total", model="mixed")
    dropped = metric(server, "tbe_ids_outside_total", model="mixed", table="word")
    ids = metric(server, "tbe_ids_total", model="mixed")
    samples = metric(server, "tbe_samples_total", model="mixed")
    with pytest.raises(InvalidRequest, match="feature 'genres'"):
        client.lookup({"genres": [[20]]})
    answer = client.lookup({"words": [[1, 1000, 2, -1], [3]]})
    assert metric(server, "tbe_rejected_total", model="mixed") == rejected + 1
    assert metric(server, "tbe_ids_outside_total", model="mixed", table="word") == dropped + 2
    assert metric(server, "tbe_ids_total", model="mixed") == ids + 3
    assert metric(server, "tbe_samples_total", model="mixed") == samples + 2
    np.testing.assert_array_equal(answer["words"], client.lookup({"words": [[1, 2], [3]]})["words"])


def test_the_default_order_needs_no_parameter(server: Server, client: LookupClient) -> None:
    bags = random_bags(np.random.default_rng(7), MIXED, 4)
    values, lengths = flat(bags)
    answer = raw_request(server, values[np.newaxis], lengths[np.newaxis])
    assert answer.shape == (1, 4, 16 + 32 + 32 + 8 + 24)
    np.testing.assert_array_equal(answer[0], np.concatenate(list(client.lookup(bags).values()), axis=1))


# --- what clients meet when there is no answer


def test_errors_of_the_client_are_typed(server: Server, client: LookupClient, gated: Path) -> None:
    with pytest.raises(InvalidRequest, match="feature 'nobody': expected one of 'user_id'"):
        client.lookup({"nobody": [[1]]})
    with LookupClient(server.grpc, "nobody", 30) as other, pytest.raises(ModelNotFound, match="model 'nobody'"):
        other.lookup({"genres": [[1]]})
    with LookupClient("127.0.0.1:1", "mixed") as nowhere, pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
        nowhere.lookup({"genres": [[1]]})
    with held(gated), pytest.raises(DeadlineExceeded):
        LookupClient(server.grpc, "gated").lookup({"genres": [[1]]}, timeout_s=0.5)
    with (
        LookupClient(server.grpc, "weighted", 30) as weighted,
        pytest.raises(InvalidRequest, match="feature 'x': expected a weight for each id"),
    ):
        weighted.lookup({"x": [[1]]})
    with pytest.raises(InvalidRequest, match="timeout_s: expected > 0 and at most 1000000, got 0"):
        LookupClient(server.grpc, "mixed", timeout_s=0)


BROKEN = """
from serving import backend, engine
from serving.backend import TritonPythonModel

decode, run = backend._decode, engine.Engine.run

def broken_decode(request):
    tensors = decode(request)
    if 13 in tensors.values:
        raise ValueError("secret of decoding")
    return tensors

def broken_run(self, batch):
    if 14 in batch.values:
        raise ValueError("secret of looking up")
    return run(self, batch)

backend._decode, engine.Engine.run = broken_decode, broken_run
"""


def test_what_no_check_foresaw_is_logged_and_told_to_nobody(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    replace_model_py(bundle, BROKEN)
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", timeout_s=30) as client,
    ):
        good = client.lookup({"x": [[1]]})["x"]
        answers = at_once([partial(client.lookup, {"x": [[id_]]}) for id_ in [1, 1, 13, 1, 1]])
        assert isinstance(answers.pop(2), ServerFault)
        for answer in answers:
            np.testing.assert_array_equal(answer["x"], good)
        for id_ in (13, 14):
            with pytest.raises(ServerFault, match=r"m': lookup failed: the server's log says why$"):
                client.lookup({"x": [[id_]]})
        np.testing.assert_array_equal(client.lookup({"x": [[1]]})["x"], good)
    log = (tmp_path / "log").read_text()
    assert "secret of decoding" in log
    assert "secret of looking up" in log


# --- running servers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_and_stops_when_it_is_told_to(one_model: Path, number: signal.Signals) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS, "--http", "--json") as process:
        assert process.stdout is not None
        where = json.loads(process.stdout.readline())
        assert {model["name"]: model["versions"] for model in where["models"]} == {"m": [1]}
        with LookupClient(where["grpc"], "m", 30) as client:
            assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)
        assert urllib.request.urlopen(f"http://{where['http']}/v2/health/ready", timeout=30).status == 200
        assert urllib.request.urlopen(f"http://{where['metrics']}/metrics", timeout=30).status == 200
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""


def test_servers_that_start_together_take_different_ports() -> None:
    with contextlib.ExitStack() as starting:
        taken = [starting.enter_context(free_ports(Access(http=True), FREE)) for _ in range(300)]
    chosen = [port for each in taken for port in (each.grpc, each.http, each.metrics)]
    assert len(set(chosen)) == 900


def test_a_signal_before_the_models_are_ready_stops_the_server_too(one_model: Path) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (started := children.read_text().split()):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{started[0]}").exists()


def test_the_server_dies_with_its_command(one_model: Path) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS, "--json") as process:
        assert process.stdout is not None
        process.stdout.readline()
        (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{server}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{server}/exe").exists()


def test_a_server_that_dies_ends_the_command_with_a_failure(one_model: Path) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS, "--no-recover", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(server), signal.SIGKILL)
        assert process.wait(30) == 128 + signal.SIGKILL
        assert "tritonserver exited with -9" in process.stderr.read()


def test_a_bundle_that_does_not_load_fails_the_start_with_its_reason(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    os.truncate(bundle / "weights.0.bin", 100)
    with (
        pytest.raises(ServerFailed, match=r"weights\.0\.bin: expected \d+ bytes, got 100"),
        run_server(tmp_path / "r", FREE, log=tmp_path / "log"),
    ):
        pass


def test_what_cannot_be_served_is_said_before_anything_starts(tmp_path: Path, server: Server) -> None:
    ports = FREE
    with pytest.raises(ServerFailed, match="found no folder"), run_server(tmp_path / "none", ports):
        pass
    with pytest.raises(ServerFailed, match="found none"), run_server(tmp_path, ports):
        pass
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "manifest.json").write_text("")
    taken = Ports(grpc=int(server.grpc.rpartition(":")[2]), http=0, metrics=0)
    with pytest.raises(ServerFailed, match=f"--grpc-port {taken.grpc}: cannot listen"), run_server(tmp_path, taken):
        pass


def test_a_tritonserver_on_the_path_comes_first(
    one_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the official container: its own backends, our Python. Here a script that stands where it would."""
    with contextlib.ExitStack() as stack:
        bundled = installation.find_tritonserver(stack)
        script = tmp_path / "bin" / "tritonserver"
        script.parent.mkdir()
        exports = "".join(f"export {key}='{value}'\n" for key, value in bundled.environment.items())
        script.write_text(
            f"#!/bin/sh\n{exports}echo started from PATH\n"
            f'exec {bundled.program} --backend-directory={bundled.backends} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        with run_server(one_model, FREE, log=tmp_path / "log") as server:
            assert [model.name for model in server.models] == ["m"]
    assert "started from PATH" in (tmp_path / "log").read_text()


def test_without_any_tritonserver_it_says_how_to_get_one(one_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    with (
        pytest.raises(ServerFailed, match=r"official container, or `pip install nvidia-pytriton==0\.7\.0`"),
        run_server(one_model, FREE),
    ):
        pass


def weights_pss_bytes(process: int, name: str) -> list[int]:
    """Proportional memory of every mapping of a file called `name` in a process and its children."""
    found = []
    for entry in [process, *descendants(process)]:
        mapping = False
        for line in Path(f"/proc/{entry}/smaps").read_text().splitlines():
            first = line.split()[0]
            if not first.endswith(":"):
                mapping = line.endswith(name)
            elif mapping and first == "Pss:":
                found.append(1024 * int(line.split()[1]))
    return found


def descendants(process: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [each for child in children for each in descendants(child)]


def test_servers_and_instances_on_one_bundle_share_one_copy_of_its_weights(tmp_path: Path) -> None:
    """Two servers, the second with two instances of the model, on the same file."""
    rows = 400_000
    bundle = export_model(collection((Spec("t", rows, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    size = (bundle / "weights.0.bin").stat().st_size
    shutil.copytree(tmp_path / "r", tmp_path / "two", copy_function=os.link)
    config = tmp_path / "two" / "m" / "config.pbtxt"
    text = config.read_text()
    config.unlink()
    config.write_text(text.replace("count: 1", "count: 2"))
    every_row = {"x": (np.arange(rows), np.array([rows]))}
    ports = FREE
    with (
        run_server(tmp_path / "r", ports, log=tmp_path / "log1") as one,
        run_server(tmp_path / "two", ports, log=tmp_path / "log2") as two,
    ):
        for server in (one, two):
            with LookupClient(server.grpc, "m", timeout_s=30) as client:
                client.lookup(every_row)
        pss = [weights_pss_bytes(server.process.pid, "/m/1/weights.0.bin") for server in (one, two)]
    assert [len(each) for each in pss] == [1, 2]
    assert 0 < sum(map(sum, pss)) < 1.1 * size  # what is shared counts once; what the kernel took back, not at all


def test_a_model_of_another_backend_is_no_lookup_model(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    config = bundle.parent / "config.pbtxt"
    config.write_text(config.read_text().partition("parameters {")[0] + 'backend: "python"\n')
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 30) as client,
        pytest.raises(ServerFault, match="was not made by tbe-export"),
    ):
        client.lookup({"x": [[1]]})
