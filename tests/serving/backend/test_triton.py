"""Lookups by a real tritonserver: what is answered is right, alone or merged with others."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchrec import KeyedJaggedTensor

from export import export_model
from serving.client import LookupClient
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.server import Server
from tests.support import bundle_reader, oracle
from tests.support.models import MIXED, MIXED_CONFIG, SUM, Bags, collection, flat, float_tables, random_bags, table_of
from tests.support.servers import (
    gate_closed,
    metric,
    raw_request,
    running,
    stubs,
    wait_for_execution,
    wait_for_pending,
)

FEATURES = list(table_of(MIXED))


def expected(bundle: Path, bags: dict[str, Bags]) -> dict[str, npt.NDArray[Any]]:
    tables = table_of(MIXED)
    return {
        name: oracle.pool(bundle_reader.exported_table(bundle, tables[name].name), column, tables[name].pooling)
        for name, column in bags.items()
    }


def test_served_answers_are_numpy_s_over_the_exported_bytes(client: LookupClient, mixed: Path) -> None:
    bags = random_bags(np.random.default_rng(0), MIXED, 100)
    answer = client.lookup(bags)
    assert list(answer) == FEATURES
    for name, rows in expected(mixed, bags).items():
        assert answer[name].dtype == np.float32
        np.testing.assert_allclose(answer[name], rows, rtol=1e-6, atol=1e-6)


def test_served_answers_are_within_the_quantization_bound(server: Server) -> None:
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


def test_a_model_on_four_ranks_answers_as_on_one(client: LookupClient, server: Server) -> None:
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


def test_requests_without_samples_or_ids_are_answered(client: LookupClient) -> None:
    assert client.lookup({"genres": []})["genres"].shape == (0, 8)
    assert client.lookup({"genres": [[], []]})["genres"].tolist() == [[0] * 8] * 2
    assert client.lookup({"genres": [[3]]})["genres"].shape == (1, 8)


def test_fp16_output_is_answered_in_fp16(server: Server, mixed: Path) -> None:
    with LookupClient(server.grpc, "half", timeout_s=30) as client:
        answer = client.lookup({"genres": [[3, 5]]})["genres"]
    assert answer.dtype == np.float16
    rows = expected(mixed.parents[1] / "half" / "1", {"genres": [[3, 5]]})["genres"]
    np.testing.assert_allclose(answer, rows, rtol=1e-3, atol=1e-4)


def test_a_request_of_20_000_samples_is_answered(client: LookupClient, mixed: Path) -> None:
    bags = random_bags(np.random.default_rng(4), MIXED, 20_000, ["item_id", "words"])
    answer = client.lookup(bags)
    for name, rows in expected(mixed, {name: column[:50] for name, column in bags.items()}).items():
        np.testing.assert_allclose(answer[name][:50], rows, rtol=1e-6, atol=1e-6)


def test_the_client_knows_features_and_dims_from_the_server(client: LookupClient) -> None:
    assert client.info().dims == {name: table_of(MIXED)[name].dim for name in FEATURES}
    assert client.info().weighted == ()


def some_request(random: np.random.Generator) -> dict[str, Bags]:
    features = random.permutation(FEATURES)[: random.integers(1, 6)].tolist()
    return random_bags(random, MIXED, int(random.integers(0, 40)), features)


def test_64_concurrent_requests_are_answered_bit_for_bit_as_alone(server: Server, gated: Path) -> None:
    random = np.random.default_rng(5)
    client = LookupClient(server.grpc, "gated", timeout_s=120)
    requests = [some_request(random) for _ in range(64)]
    alone = [client.lookup(request) for request in requests]
    calls = metric(server, "tbe_calls_total", model="gated")
    answered = metric(server, "tbe_requests_total", model="gated")
    for _ in range(3):
        with ThreadPoolExecutor(65) as pool:
            with gate_closed(gated):
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


def test_the_default_order_needs_no_parameter(server: Server, client: LookupClient) -> None:
    bags = random_bags(np.random.default_rng(7), MIXED, 4)
    values, lengths = flat(bags)
    answer = raw_request(server, values[np.newaxis], lengths[np.newaxis])
    assert answer.shape == (1, 4, 16 + 32 + 32 + 8 + 24)
    np.testing.assert_array_equal(answer[0], np.concatenate(list(client.lookup(bags).values()), axis=1))


@pytest.mark.long
def test_several_threads_answer_a_large_request_like_one_thread(tmp_path: Path) -> None:
    for name, threads in (("one", 1), ("three", 3)):
        config = replace(MIXED_CONFIG, serving=ServingSettings(threads=threads))
        export_model(collection(MIXED), tmp_path / "r", name, config)
    random = np.random.default_rng(3)
    with running(tmp_path / "r") as server, Engine.open(tmp_path / "r" / "one" / "1") as engine:
        for samples in (1, 8000):  # the answer to the second is more than 2 MB
            bags = random_bags(random, MIXED, samples)
            expected = engine.lookup(bags)
            for name in ("one", "three"):
                with LookupClient(server.grpc, name, timeout_s=30) as client:
                    answer = client.lookup(bags)
                for feature, rows in expected.items():
                    np.testing.assert_array_equal(answer[feature], rows)
        one, three = (stubs(server.triton, name)[0].num_threads() for name in ("one", "three"))
    assert three == one + 2
