"""A number for each id of a history, and a score for each of a user's candidates: in this process and from a server."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export import Sharding, export_model
from serving.bundle.load import open_bundle
from serving.client import AsyncLookupClient, LookupClient, Retries
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.lookup import dense_program
from serving.model.settings import ServingSettings
from serving.requests.accept import accept
from serving.requests.answer_columns import AnswerColumns
from serving.requests.captured import read_captured
from serving.requests.chunks import ChunkLimits
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from tests.support.candidate_model import MODULE, NOW, Asked, ask, assert_right, example, expected
from tests.support.commands import tbe_export
from tests.support.host_faults import until
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.scored_models import EXACT
from tests.support.sequence_models import kjt_of
from tests.support.servers import Running, at_once, running, tbe_serve


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "captured").mkdir()
    serving = ServingSettings(capture=str(folder / "captured"), capture_slow_ms=1e-6)
    return export_model(MODULE, folder / "r", "m", replace(EXACT, serving=serving), example=example())


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.open(bundle) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    with running(bundle.parent.parent) as server:
        yield server


def test_the_manifest_names_the_key_of_each_per_id_input_and_output(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    part = manifest.dense_part
    assert part is not None
    assert not part.mixes_samples, part.mixed_by
    keys = {"session.now": None, "session.times": "seen", "session.paid": "seen"}
    assert {dense_input.name: dense_input.key for dense_input in part.inputs} == keys
    assert {output.name: output.key for output in part.outputs} == {"user": None, "score": "target", "odd": "seen"}
    assert part.together == (("seen", "bought_in"),)
    printed = tbe_export("inspect", str(bundle)).stdout
    assert "session.now INT64 [B], session.times INT64 [ids of seen], session.paid [ids of seen, 2]" in printed
    assert "scores need as many ids of bought_in as of seen in each sample" in printed
    assert "example: session.paid has a row for each id of seen, and comes as a dense input" in manifest.notes


def test_requests_are_scored_alone_and_together(engine: Engine) -> None:
    random = np.random.default_rng(2)
    requests = [ask(random, number % 5, longest=number % 4) for number in range(24)]
    for bags, dense in requests:
        assert_right(engine.score(bags, dense), expected(bags, dense))
    answers = together(engine, requests)
    for (bags, dense), answer in zip(requests, answers, strict=True):
        assert_right(answer, expected(bags, dense))


def together(engine: Engine, calls: Sequence[Asked], shared: Sequence[Sequence[str]] = ()) -> list[Any]:
    part = engine.bundle.manifest.dense_part
    assert part is not None
    names = [output.name for output in part.outputs]
    requests = [
        replace(encode(bags, (), shared_names), outputs=names, dense=encode_dense(part.inputs, dense))
        for (bags, dense), shared_names in zip(calls, shared or [()] * len(calls), strict=True)
    ]
    return engine.answer([accept(engine.schema, request) for request in requests]).outcomes()


@given(st.data())
def test_shared_features_count_for_each_sample(engine: Engine, data: st.DataObject) -> None:
    """Its numbers come once with it; and its scores are those of the same request with all of it repeated."""
    random = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    requests, shared, right = [], [], []
    for _ in range(data.draw(st.integers(1, 4), label="requests")):
        samples = data.draw(st.integers(0, 4), label="samples")
        bags, dense = ask(random, samples)
        user, of_user = ask(random, 1)
        whole = data.draw(st.sampled_from([(), ("seen", "bought_in"), ("target",), tuple(bags)]), label="once")
        by_id = ("session.times", "session.paid") if "seen" in whole else ()
        requests.append(
            (
                {key: (user if key in whole else bags)[key] for key in bags},
                {name: (of_user if name in by_id else dense)[name] for name in dense},
            )
        )
        shared.append(whole)
        right.append(
            expected(
                {key: user[key] * samples if key in whole else bags[key] for key in bags},
                {name: of_user[name] * samples if name in by_id else dense[name] for name in dense},
            )
        )
    for (bags, dense), names, numbers in zip(requests, shared, right, strict=True):
        assert_right(engine.score(bags, dense, shared=names), numbers)
    for answer, numbers in zip(together(engine, requests, shared), right, strict=True):
        assert_right(answer, numbers)


def test_samples_are_scored_some_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    bags, dense = ask(np.random.default_rng(4), 50)
    right = expected(bags, dense)
    for size in (1, 7, 64):
        monkeypatch.setattr(dense_program, "SLICE", size)
        assert_right(engine.score(bags, dense), right)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one too few": (
        {},
        {"session.times": [[NOW], [NOW]]},
        r"'session.times': expected bags .*, got 1 rows for the 2 ids of sample 0$",
    ),
    "in other bags": ({}, {"session.times": [[NOW], [NOW] * 2]}, "got 1 rows for the 2 ids of sample 0$"),
    "in more bags": ({}, {"session.times": [[NOW], [NOW], [NOW]]}, "got bags of 3 samples for ids of 2$"),
    "no ids of two keys": (
        {"seen": None, "bought_in": None},
        {},
        "expected all features, .*, got no ids of '.*', '.*': send empty bags",
    ),
    "flat, one too many": (
        {},
        {"session.times": [NOW] * 4},
        r"expected int64 \[3\], a row for each id of .* got int64 \[4\]",
    ),
    "floats": ({}, {"session.times": [[0.5] * 2, [0.5]]}, "'session.times': expected integers"),
    "of another width": ({}, {"session.paid": [[[1.0]] * 2, [[1.0]]]}, r"'session.paid': expected float32 \[3, 2\]"),
    "none": ({}, {"session.paid": None}, "'session.paid'"),
    "as many ids in other samples": (
        {"bought_in": [[1], [2, 3]]},
        {},
        "expected as many ids as '.*' has in each sample",
    ),
    "more ids of one key": (
        {"bought_in": [[1, 2], [3, 4]]},
        {},
        "in each sample, the model puts their rows side by side",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_inputs_with_other_row_counts_are_refused_by_name(engine: Engine, server: Running, wrong: str) -> None:
    """By the engine and the client; and by the server, for another client says nothing of it."""
    bags = {"seen": [[1, 2], [3]], "target": [[4], [5, 6]], "bought_in": [[1, 2], [3]]}
    dense: dict[str, Any] = {
        "session.now": [NOW, NOW],
        "session.times": [[NOW] * 2, [NOW]],
        "session.paid": [[[1.0, 2.0]] * 2, [[3.0, 4.0]]],
    }
    other_bags, other_dense, why = WRONG[wrong]
    bags, dense = {**bags, **other_bags}, {**dense, **other_dense}
    bags, dense = (
        {name: values for name, values in inputs.items() if values is not None} for inputs in (bags, dense)
    )
    with pytest.raises(InvalidRequest, match=why):
        engine.score(bags, dense)
    with (
        LookupClient(server.grpc, "m", 60, retries=Retries(attempts=1)) as client,
        pytest.raises(InvalidRequest, match=why),
    ):
        client.score(bags, dense)


def test_per_id_numbers_are_shared_only_with_their_key(engine: Engine) -> None:
    bags, dense = ask(np.random.default_rng(5), 3)
    with pytest.raises(InvalidRequest, match=r"^once: 'session.times': has a row for each id of '.*': name that key"):
        engine.score(bags, dense, shared=["session.times"])


def test_clients_score_merged_with_others(server: Running) -> None:
    random = np.random.default_rng(6)
    requests = [ask(random, number % 5, longest=number % 6) for number in range(40)]
    bad = [
        ({**bags, "bought_in": [[1], *bags["seen"][1:]]}, dense)
        for bags, dense in requests
        if len(bags["seen"][:1]) and len(bags["seen"][0]) > 1
    ]
    with LookupClient(server.grpc, "m", 60) as client:
        calls: list[Any] = [partial(client.score, *request) for request in (*requests, *bad)]
        calls += [partial(client.lookup, bags) for bags, _ in requests[1:5]]
        answers = at_once(calls)
        for request, answer in zip(requests, answers, strict=False):
            assert_right(answer, expected(*request))
        assert bad
        for refused in answers[len(requests) : len(requests) + len(bad)]:
            assert isinstance(refused, InvalidRequest), refused
        for (bags, _), answer in zip(requests[1:], answers[len(requests) + len(bad) :], strict=False):
            with torch.no_grad():
                rows = MODULE.rows(kjt_of(bags))
            for key in bags:
                np.testing.assert_array_equal(answer[key].values, rows[key].values().numpy())
        user, dense = ask(random, 1)
        items = {**user, "target": [[number] for number in range(30)]}
        many = {**dense, "session.now": dense["session.now"] * 30}
        answer = client.score(items, many, shared=["seen", "bought_in"])
        repeated = {**{key: user[key] * 30 for key in user}, "target": items["target"]}
        by_id = {name: dense[name] * 30 for name in ("session.times", "session.paid")}
        assert_right(answer, expected(repeated, {**many, **by_id}))
        assert [*client.score(*requests[3], outputs=["score"])] == ["score"]

    async def run() -> None:
        async with AsyncLookupClient(server.grpc, "m", 60) as client:
            for request, answer in zip(
                requests, await asyncio.gather(*(client.score(*request) for request in requests)), strict=True
            ):
                assert_right(answer, expected(*request))

    asyncio.run(run())


def assert_lists(answer: AnswerColumns[Any], lengths: Mapping[str, Sequence[int]]) -> None:
    """As a DataFrame, an answer has a row for each sample: for rows of ids, a list of as many as the sample has."""
    frame = answer.to_polars()
    assert answer.to_arrow().to_pydict() == frame.to_dict(as_series=False)
    for name, counts in lengths.items():
        if name in answer:
            assert [*map(len, frame[name])] == [*map(len, answer.to_pandas()[name])] == [*counts]
            rows = [row for rows in frame[name].to_list() for row in rows]
            np.testing.assert_array_equal(np.array(rows).ravel(), answer[name].ravel())


def test_rows_of_ids_are_columns_of_lists(engine: Engine, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for limits in ("serving.engine.engine_chunk_limits", "serving.client.streams.chunk_limits"):
        monkeypatch.setattr(limits, lambda *_, **__: ChunkLimits(3, 40))
    random = np.random.default_rng(9)
    bags, dense = ask(random, 10)
    lengths = {name: [*map(len, bags[key])] for name, key in (("score", "target"), ("odd", "seen"))}
    user, of_user = ask(random, 1)
    items = {**user, "target": bags["target"]}
    of_items = {**of_user, "session.now": dense["session.now"]}
    of_one = {"score": lengths["score"], "odd": [len(user["seen"][0])] * 10}
    with LookupClient(server.grpc, "m", 60) as client:
        for model in (engine, client):
            assert_lists(model.score(bags, dense), lengths)
            assert_lists(model.score(items, of_items, shared=["seen", "bought_in"]), of_one)
            for answer in model.stream([(bags, dense)] * 2):
                assert_lists(answer, lengths)
        (score,) = client.stream([(bags, dense)], outputs=["score"])
        assert [*score] == ["score"]
        assert_lists(score, lengths)


def captured_by(bundle: Path) -> Path:
    return bundle.parent.parent.parent / "captured" / "m.jsonl"


def test_lines_of_json_are_scored_and_captured(server: Running, bundle: Path) -> None:
    bags, dense = ask(np.random.default_rng(7), 3)
    line = json.dumps({"features": bags, "dense": dense})
    answered = tbe_serve("score", "m", "--url", server.grpc, stdin=line)
    assert answered.returncode == 0, answered.stderr
    assert_right(
        {name: np.array(value) for name, value in json.loads(answered.stdout).items()}, expected(bags, dense)
    )
    shown = tbe_serve("score", "m", "--url", server.grpc, "--table", stdin=line)
    assert shown.returncode == 0, shown.stderr
    captured = captured_by(bundle)
    until(captured.exists, "the request was captured")
    captured_tensors = [record.tensors for record in read_captured(captured)]
    assert any(tensors.dense.keys() == dense.keys() for tensors in captured_tensors)


@pytest.mark.long
def test_bench_makes_and_replays_requests_of_them(server: Running, bundle: Path) -> None:
    with LookupClient(server.grpc, "m", 60) as client:
        client.score(*ask(np.random.default_rng(7), 3))
    until(captured_by(bundle).exists, "the request was captured")
    common = ("--clients", "2", "--seconds", "0.4", "--repeats", "1", "--warm-up", "0", "--check", "1")
    for options in (("--scores",), ("--replay", str(captured_by(bundle)), "--max-errors", "1")):
        done = tbe_serve("bench", "m", "--url", server.grpc, "--bundle", str(bundle), *options, *common)
        assert done.returncode == 0, done.stderr
        assert "all right" in done.stdout


def test_a_published_bundle_is_verified_with_its_example(bundle: Path) -> None:
    model = "tests.support.candidate_model:build"
    example_of = "tests.support.candidate_model:example"
    done = tbe_export("verify", str(bundle), "--model", model, "--example", example_of)
    assert done.exit_code == 0, done.output
    assert tbe_export("verify", str(bundle)).exit_code == 0


@pytest.mark.long
def test_a_router_scores_per_id_numbers(tmp_path: Path) -> None:
    types = {"film": "row_wise", "shop": "column_wise"}
    sharding = Sharding(ranks=2, ranks_per_host=1, types=types)
    router = export_hosts(tmp_path, MODULE, replace(EXACT, sharding=sharding, example=example()))
    random = np.random.default_rng(8)
    requests = [ask(random, number % 4) for number in range(16)]
    with fleet(tmp_path, router) as served, LookupClient(served.router.grpc, MODEL, 60) as client:
        for request, answer in zip(
            requests, at_once([partial(client.score, *request) for request in requests]), strict=True
        ):
            assert_right(answer, expected(*request))
