"""The load generator against a server that answers and stalls as told."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from export import ExportConfig, IdPolicy, WeightDtype, export_model
from serving.bench.generator import Repeat, Traffic, generate
from serving.bench.report import refusal, summarize
from serving.bench.requests import Distribution, Prepared, random_requests
from serving.bundle.load import open_bundle
from serving.bundle.tables import DefaultRow
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.reference import pool
from serving.requests.types import Tensors
from tests.support import bundle_reader, oracle
from tests.support.models import MIXED, collection

ONE = Prepared(Tensors(None, np.arange(3), np.array([3], np.int32)), b"", 1)


class Fake(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Runs `act` on each call, one at a time."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def ModelInfer(self, request: object, context: grpc.ServicerContext) -> pb.ModelInferResponse:  # noqa: ARG002, N802
        self.act()
        return pb.ModelInferResponse()


@contextmanager
def serving(act: Callable[[], None] = lambda: None) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Fake(act), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def load(clients: int = 0, rate: float = 0, seconds: float = 1, repeats: int = 1, check: float = 0) -> Traffic:
    return Traffic(clients=clients, rate=rate, seconds=seconds, repeats=repeats, warm_up_s=0, check=check)


def test_a_stall_adds_latency_to_every_request_that_was_due() -> None:
    """A closed loop sends nothing meanwhile, and has one slow answer; an open one has all that were due."""
    calls = Counter[str]()

    def stall() -> None:
        calls["all"] += 1
        if calls["all"] == 30:
            time.sleep(0.5)

    with serving(stall) as url:
        (run,) = generate(url, [ONE], load(rate=100, seconds=1.5), 60)
    held_up = [latency for latency in run.latencies_s if latency > 0.1]
    assert len(held_up) > 15  # 0.4 s at 100 a second, less luck
    assert max(held_up) > 0.4
    assert 100 < len(run.latencies_s) < 200  # however busy the machine is: all that were due in that time
    assert sum(run.latencies_s) > run.seconds
    calls.clear()
    with serving(stall) as url:
        (run,) = generate(url, [ONE], load(clients=1), 60)
    assert max(run.latencies_s) > 0.4
    assert sum(run.latencies_s) <= run.seconds  # one after the other


def test_requests_are_counted_with_samples_ids_and_errors() -> None:
    calls = Counter[str]()

    def fail_every_other() -> None:
        calls["all"] += 1
        if calls["all"] % 2:
            raise RuntimeError

    with serving(fail_every_other) as url:
        first, second = generate(url, [ONE], load(clients=2, repeats=2), 60)
        shared = generate(url, [ONE], load(clients=3), 60, processes=2)
    for run in (first, second, *shared):
        assert 0 < len(run.latencies_s) == run.samples == run.ids / 3
        assert run.errors.keys() == {"InternalError"}
        assert abs(run.errors["InternalError"] - run.samples) <= 3
        assert run.seconds >= 1
    assert len(shared) == 1


def test_deadlines_are_errors() -> None:
    with serving(lambda: time.sleep(0.3)) as url:
        (run,) = generate(url, [ONE], load(clients=1, seconds=0.2), 0.1)
    assert not run.latencies_s
    assert run.errors.keys() == {"DeadlineExceeded"}
    assert refusal(load(clients=1), [run]) is None
    report = summarize(load(clients=1), 1, [run])
    assert (report.answers, report.latency_s) == (0, {})


@pytest.mark.parametrize(
    ("load_", "run", "why"),
    [
        (
            load(clients=1),
            Repeat(latencies_s=[1.0], busy=0.95),
            "the generator was the bottleneck: it was at work 95%",
        ),
        (load(rate=9), Repeat(latencies_s=[0.01] * 9, late_s=[0.005] * 9), "went out 5.0 ms late"),
        (load(clients=1), Repeat(latencies_s=[1.0], checked=3, wrong=["feature 'x': off"]), "wrong answers (1 of 3"),
        (load(clients=1), Repeat(latencies_s=[0.01] * 9, late_s=[0.005] * 9, busy=0.5), None),
        (load(rate=9), Repeat(late_s=[0.005] * 9), None),
    ],
    ids=["busy", "late", "wrong", "believed", "few_answers"],
)
def test_results_are_refused_if_the_generator_was_the_bottleneck(
    load_: Traffic, run: Repeat, why: str | None
) -> None:
    problem = refusal(load_, [Repeat(latencies_s=[0.01]), run])
    assert problem is None if why is None else why in str(problem)


def test_a_busy_generator_is_noticed() -> None:
    with serving() as url:
        (run,) = generate(url, [ONE], load(clients=16, seconds=0.5), 60)
    with serving(lambda: time.sleep(0.1)) as url:
        (waiting,) = generate(url, [ONE], load(clients=1, seconds=0.5), 60)
    assert 0 < waiting.busy < run.busy <= 1  # how busy, others on the machine have a say in


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ExportConfig(
        dtype={"*": WeightDtype.INT4}, id_policy={"user": IdPolicy.ZERO, "item": DefaultRow(default_row=1)}
    )
    return export_model(collection(MIXED), tmp_path_factory.mktemp("load") / "r", "m", config)


def test_bags_have_the_pooling_factors_asked_for(bundle: Path) -> None:
    opened = open_bundle(bundle)
    names = [feature.name for feature in opened.manifest.features]
    factors = dict(zip(names, [0.0, 2.3, 5.0][: len(names)] + [1.0] * (len(names) - 3), strict=True))
    lengths = np.concatenate(
        [
            request.lengths.reshape(len(names), 50)
            for request in random_requests(opened.manifest, 50, Distribution(), factors)
        ],
        axis=1,
    )
    for name, bags in zip(names, lengths, strict=True):
        assert set(bags.tolist()) <= {int(factors[name]), int(np.ceil(factors[name]))}
        assert bags.mean() == pytest.approx(factors[name], rel=0.05)


def test_the_reference_agrees_with_the_oracle_and_the_engine(bundle: Path) -> None:
    """Over ids outside their tables too, each by its table's policy."""
    opened = open_bundle(bundle)
    features = opened.manifest.features
    random = np.random.default_rng(3)
    bags = {
        feature.name: [random.integers(0, table.rows, random.integers(0, 5)).tolist() for _ in range(20)]
        for feature, table in zip(features, opened.manifest.feature_tables, strict=True)
    }
    lengths = np.array([len(bag) for feature_bags in bags.values() for bag in feature_bags], np.int32)
    values = np.array([id_ for feature_bags in bags.values() for bag in feature_bags for id_ in bag])
    request = Tensors(None, values, lengths)
    prepared = pool(bundle, opened.manifest, request)
    for feature, table, answer in zip(features, opened.manifest.feature_tables, prepared.answers, strict=True):
        exact = oracle.pool(bundle_reader.exported_table(bundle, table.name), bags[feature.name], table.pooling.value)
        np.testing.assert_allclose(answer, exact, atol=1e-6)
    embeddings = Engine.open(bundle).outputs(request)[EMBEDDINGS]
    assert list(prepared.misses(prepared.by_feature({"embeddings": embeddings}))) == []
    embeddings = embeddings.copy()
    embeddings[3, -1] += 1e-3
    assert [name for name, _ in prepared.misses(prepared.by_feature({"embeddings": embeddings}))] == [
        features[-1].name
    ]


def test_ids_outside_a_table_are_answered_by_its_policy(bundle: Path) -> None:
    opened = open_bundle(bundle)
    names = [feature.name for feature in opened.manifest.features]
    values = np.array([-1, 0, 1 << 40] * len(names))
    request = Tensors(None, values, np.array([3] * len(names), np.int32))
    tables = {table.name: table for table in opened.manifest.tables}
    table_names = [
        feature.name for feature in opened.manifest.features if tables[feature.table].id_policy is not IdPolicy.ERROR
    ]
    request = Tensors(table_names, values[: 3 * len(table_names)], request.lengths[: len(table_names)])
    assert len(table_names) > 1
    answer = Engine.open(bundle).outputs(request)[EMBEDDINGS]
    prepared = pool(bundle, opened.manifest, request)
    assert list(prepared.misses(prepared.by_feature({"embeddings": answer}))) == []
