"""Malformed and hostile requests to a real server: some thousands here, a hundred thousand in `make fuzz`."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from serving.client import LookupClient
from serving.server import Server, run_server
from tests.fuzz.contract import Model, judge
from tests.fuzz.good import good
from tests.fuzz.killer import recovery_s
from tests.fuzz.lies import fuzz_hosts
from tests.fuzz.operations import fuzz_operations
from tests.fuzz.run import DIED, LOOKS, METHOD, TOGETHER, WELL, Outcome, fuzz, send_together
from tests.fuzz.served import deltas, publish
from tests.support.hosts import only
from tests.support.leak_check import keeps_growing
from tests.support.servers import FREE, metric, replace_model_py

COUNT = 2_000
FAULTY_COUNT = 5_000
# A server that never answered such messages grows until some ten thousand came: buffers of all sizes, for each thread.
# How many it takes, the scheduler says. It has so many times MANY messages to come to an end.
MANY, MOST_TIMES = 15_000, 4
NOISE_BYTES = 256 << 10


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Model], Path]:
    repository = tmp_path_factory.mktemp("fuzz") / "r"
    return publish(repository), repository


@pytest.fixture(scope="module")
def served(published: tuple[list[Model], Path]) -> Iterator[tuple[list[Model], Server]]:
    models, repository = published
    with run_server(repository, FREE, log=repository.with_name("log")) as server, deltas(repository, models):
        yield models, server


@pytest.mark.promise(
    "Every message to `ModelInfer`, whatever its bytes, is answered as [the protocol](protocol.md) says or refused with a gRPC status"
)
def test_every_message_is_answered_right_or_refused_clearly(served: tuple[list[Model], Server]) -> None:
    models, server = served
    outcome = fuzz(server.grpc, psutil.Process(server.process.pid), models, COUNT, seed=1)
    assert outcome.wrong == []
    assert outcome.sent == COUNT
    assert outcome.well == COUNT // TOGETHER * WELL
    assert outcome.statuses["INVALID_ARGUMENT"] > COUNT // 3
    assert outcome.statuses["OK"] > COUNT // 50
    assert metric(server, "tbe_calls_total") < metric(server, "tbe_requests_total"), "nothing was merged"
    copies = server.health.deltas
    assert copies is not None
    assert len(copies.applied) == len(models)
    assert all(copies_of_process.rows > 0 and not copies_of_process.stopped for copies_of_process in copies.applied)


@pytest.mark.long
def test_memory_stops_growing_under_hostile_requests(served: tuple[list[Model], Server]) -> None:
    models, server = served
    memory_bytes: list[int] = []
    for seed in range(2, MOST_TIMES + 2):
        outcome = fuzz(server.grpc, psutil.Process(server.process.pid), models, MANY, seed)
        assert outcome.wrong == []
        memory_bytes += outcome.memory_bytes
        if not keeps_growing(memory_bytes[-LOOKS:], NOISE_BYTES):
            break
    assert not keeps_growing(memory_bytes[-LOOKS:], NOISE_BYTES), memory_bytes


# What a server may do wrong, each by a line in model.py; and the model that does it.
FAULTS = {
    "dense inputs of the wrong size are taken": (
        "m",
        "accept.accept_dense = lambda inputs, given, samples, shared=(): "
        "[np.resize(given.get(each.name, np.ones(1, np.float32)), (samples, *each.shape)) for each in inputs]",
    ),
    "dense inputs are those of a neighbour": (
        "m",
        "dense_program.concatenate = lambda each: np.concatenate(each[::-1])",
    ),
    "scores are answered in the order of the features asked for": (
        "m",
        "reordered = accept._reordered; accept._reordered = lambda request, names, chosen, feature_set: "
        "reordered(request, names, chosen if feature_set.reads is not None else np.sort(chosen), feature_set)",
    ),
    "what comes once counts for one sample": (
        "m",
        "batches.repeat_shared = lambda embeddings, member: embeddings[: member.samples]",
    ),
    "what comes once is answered as if it did not": (
        "rows",
        "batches.SharedBatch.outputs = batches.PooledBatch.outputs",
    ),
    "rows are answered in the order of the tables": (
        "rows",
        "select = schema.LookupSchema.select_rows; "
        "schema.LookupSchema.select_rows = lambda self, tables: select(self, sorted(tables, reverse=True))",
    ),
    "ids outside a sequence read a row": (
        "rows",
        "apply = validate.apply_id_policies; "
        "validate.apply_id_policies = lambda request: (replace(apply(request)[0], rowless=None), {})",
    ),
    "requests whose samples would meet are scored together": (
        "meets",
        "score = dense_program.DenseProgram.score; dense_program.DenseProgram.score = lambda self, *given: "
        "(setattr(self, 'part', structs.replace(self.part, mixes_samples=False)), score(self, *given))[1]",
    ),
    "a history that comes once counts for one sample": (
        "reads",
        "jagged_inputs._is_shared = lambda request, feature: False",
    ),
    "histories are those of a neighbour": (
        "reads",
        "inputs = jagged_inputs.jagged_inputs; dense_program.jagged_inputs = lambda schema, request, rows, number: "
        "inputs(schema, request, rows, 0)",
    ),
    "ids are seen modulo the rows of their table": (
        "reads",
        "sent = jagged_inputs._sent; jagged_inputs._sent = lambda kind, *given: "
        "sent(kind, *given) % 20 if kind is JaggedKind.IDS else sent(kind, *given)",
    ),
    "numbers of ids are those of a neighbour": (
        "reads",
        "accept_dense = accept.accept_dense; accept.accept_dense = lambda *given: "
        "[each[::-1] if of.key else each for of, each in zip(given[0], accept_dense(*given))]",
    ),
    "a score by id is answered as if it were by sample": (
        "reads",
        'dense_program._rows_at = lambda *_: {"recent": 0}',
    ),
    "ids of one event may be as many as they like": ("reads", "jagged_inputs._expect_as_many = lambda *_: None"),
    "a bag may have any number of ids": ("reads", "jagged_inputs._expect_length = lambda *_: None"),
    "sequences may be of any size": ("rows", "accept.check_accepted = lambda request, limits: None"),
}
FAULTY = """
from dataclasses import replace
import numpy as np
from msgspec import structs
from serving import engine
from serving.backend import TritonPythonModel
from serving.lookup import dense_program
from serving.bundle.scores import JaggedKind
from serving.requests import accept, batches, jagged_inputs, schema, validate
"""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fuzzer_finds_planted_faults(fault: str, published: tuple[list[Model], Path], tmp_path: Path) -> None:
    models, repository = published
    name, line = FAULTS[fault]
    only(repository, [name], tmp_path / "r")
    replace_model_py(tmp_path / "r" / name / "1", FAULTY + line)
    (model,) = (model for model in models if model.name == name)
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        process = psutil.Process(server.process.pid)
        outcome = fuzz(server.grpc, process, [model], FAULTY_COUNT, seed=1, most_wrong=1)
    # A machine that stands still may end a process, too. It is the answers that give the fault away.
    assert any(not line.startswith(DIED) for line in outcome.wrong), outcome.wrong


def test_the_oracle_accepts_good_requests_and_refuses_damaged_ones(served: tuple[list[Model], Server]) -> None:
    """What judges the server tells right from wrong by itself."""
    models, _ = served
    random = np.random.default_rng(0)
    refused = 0
    for number in range(50):
        request = pb.ModelInferRequest.FromString(good(models[number % len(models)], random))
        assert judge(models, request.SerializeToString()).answer is not None
        request.raw_input_contents[0] += bytes(8)
        assert judge(models, request.SerializeToString()).answer is None
        refused += 1
    assert refused == 50


@pytest.mark.promise("A model whose process died serves lookups and scores again without any action of its clients")
def test_the_model_serves_again_after_an_overflowing_shape(
    published: tuple[list[Model], Path], tmp_path: Path
) -> None:
    """Triton 2.51's own fault; how soon is for `make fuzz` to say."""
    (model, *_), repository = published
    with run_server(only(repository, [model.name], tmp_path / "r"), FREE, log=tmp_path / "log") as server:
        recovery_s(server, model)


def test_an_empty_batch_is_answered_by_the_client_and_harms_no_other(one_model: Path, tmp_path: Path) -> None:
    """Triton never answers a first dimension of 0 on all inputs: its caller's deadline does."""
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"", b""])
    request.inputs.add(name="values", datatype="INT64", shape=[0, 0])
    request.inputs.add(name="lengths", datatype="INT32", shape=[0, 0])
    with (
        run_server(one_model, FREE, log=tmp_path / "log") as server,
        grpc.insecure_channel(server.grpc) as channel,
        LookupClient(server.grpc, "m", 60) as client,
    ):
        with pytest.raises(grpc.RpcError) as missed:
            channel.unary_unary(METHOD)(request.SerializeToString(), timeout=1)
        assert missed.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT)
        assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)
        assert client.lookup({"x": []})["x"].shape == (0, 8)
        server.process.kill()  # it would wait for that request until its exit timeout


def test_requests_that_triton_and_python_read_differently_may_fail(served: tuple[list[Model], Server]) -> None:
    """The entry `features` with its value in a field that nobody knows: to Python, there is no entry."""
    models, _ = served
    request = good(models[0], np.random.default_rng(0))
    entry = b'"\x15\n\x08features2\t\x1a\x07item_id'
    assert judge(models, request).must
    assert not judge(models, request + entry).must


@pytest.mark.parametrize("dims", [2**32, 2**32 + 1, 2**62])
def test_batch_sizes_are_read_as_triton_reads_them(served: tuple[list[Model], Server], dims: int) -> None:
    """Triton passes the rows of a request to the model with the lower 32 bits of its first dimension."""
    models, server = served
    outcome = Outcome()
    request = pb.ModelInferRequest.FromString(good(models[0], np.random.default_rng(0)))
    request.inputs[1].shape[0] = dims
    message = request.SerializeToString()
    assert judge(models, message).answer is None
    with grpc.insecure_channel(server.grpc) as channel:
        send_together(channel.unary_unary(METHOD), models, [], [message], np.random.default_rng(0), outcome)
    assert (outcome.statuses, outcome.wrong) == ({"OK": 1}, [])


def test_every_request_to_the_operations_port_is_answered_or_closed(served: tuple[list[Model], Server]) -> None:
    _, server = served
    outcome = fuzz_operations(server, 400, seed=1)
    assert outcome.wrong == []
    assert outcome.statuses.total() == 400
    for status in (0, 200, 400, 404, 405, 431):
        assert outcome.statuses[status] > 0, status


@pytest.mark.long
def test_hostile_answers_of_a_host_fail_only_its_requests(tmp_path: Path) -> None:
    outcome = fuzz_hosts(tmp_path, 600, seed=1)
    assert outcome.wrong == []
    assert outcome.refused >= 500
    assert outcome.answered >= 500
