"""Sequences and rows of tables, from a server: by both clients, any other, JSON lines, and replayed."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils as triton_errors

from export import export_model
from serving.client import AsyncLookupClient, LookupClient
from serving.errors import InvalidRequest
from serving.model.settings import ServingSettings
from tests.support.host_faults import until
from tests.support.models import collection, random_bags
from tests.support.sequence_models import (
    FP32,
    POOLED,
    SPECS,
    Mixed,
    assert_mixed,
    check_together,
)
from tests.support.servers import Running, lens, row, running, tbe_serve


@dataclass(frozen=True)
class Served:
    server: Running
    module: Mixed
    bundle: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`m`, and `pooled` without sequences."""
    folder = tmp_path_factory.mktemp("served")
    module = Mixed()
    serving = ServingSettings(max_sequence_bytes=1 << 20)
    bundle = export_model(module, folder / "r", "m", replace(FP32, serving=serving))
    export_model(collection(POOLED), folder / "r", "pooled", FP32)
    with running(folder / "r") as server:
        yield Served(server, module, bundle)


def test_merged_requests_for_sequences_are_served(served: Served) -> None:
    with LookupClient(served.server.grpc, "m", 60) as client:
        info = client.info()
        assert info.sequences == {"recent", "seen", "words"}
        assert info.tables == {"user": 16, "genre": 8, "item": 32, "word": 32}
        check_together(client.lookup, served.module)
        answer = client.lookup({"words": [[7], [], [7, 8]]})
        assert not answer["words"].values.flags.writeable
        assert [len(answer["words"].rows(sample)) for sample in range(3)] == [1, 0, 2]
        with pytest.raises(IndexError):
            answer["words"].rows(3)
        rows_by_number = {number: client.lookup({"recent": [[number]]})["recent"].rows(0) for number in range(9)}
        items = served.module.rows.embeddings["item"].weight.detach().numpy()
        for number, rows in rows_by_number.items():  # no answer takes the memory of another
            np.testing.assert_array_equal(rows[0], items[number])


def test_rows_are_served(served: Served) -> None:
    """Of any table, of models with and without sequences."""
    state = served.module.state_dict()
    with LookupClient(served.server.grpc, "m", 60) as client:
        for table, key in (("user", "pooled.embedding_bags.user"), ("item", "rows.embeddings.item")):
            for ids in ([5], [], [3, 1, 3], np.arange(200, dtype=np.int32)):
                rows = client.rows(table, ids)
                np.testing.assert_array_equal(rows, state[f"{key}.weight"].numpy()[np.array(ids, np.int64)])
        with pytest.raises(InvalidRequest, match="table 'recent': expected one of 'user', 'genre', 'item', 'word'"):
            client.rows("recent", [1])
        with pytest.raises(InvalidRequest, match=r"table 'item': expected an id in \[0, 300\)"):
            client.rows("item", [300])
        with pytest.raises(
            InvalidRequest, match="bytes of sequences: expected at most 1048576 in a request, got 1048704"
        ):
            client.rows("item", np.zeros(8193, np.int64))
    with LookupClient(served.server.grpc, "pooled", 60) as client:
        assert client.rows("genre", [1, 2]).shape == (2, 8)
        assert client.lookup({"user_id": [1]}).keys() == {"user_id"}


def test_the_async_client_gets_sequences_and_rows(served: Served) -> None:
    async def run() -> None:
        async with AsyncLookupClient(served.server.grpc, "m", 60) as client:
            bags = random_bags(np.random.default_rng(7), SPECS, 3)
            answers = await asyncio.gather(*(client.lookup(bags) for _ in range(5)))
            for answer in answers:
                assert_mixed(answer, served.module, bags)
            many = await asyncio.gather(*(client.rows("item", [number]) for number in range(5)))
            np.testing.assert_array_equal(np.concatenate(many), await client.rows("item", range(5)))

    asyncio.run(run())


def ask(served: Served, inputs: list[tuple[str, Any]], outputs: list[str] | None = None, **parameters: Any) -> Any:
    """What any KServe client sends, and gets: {output: array}."""
    sent = []
    for name, array in inputs:
        sent.append(
            triton.InferInput(name, list(array.shape), {"int64": "INT64", "int32": "INT32"}[str(array.dtype)])
        )
        sent[-1].set_data_from_numpy(array)
    requested = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    with triton.InferenceServerClient(served.server.grpc) as client:
        response = client.infer("m", sent, outputs=requested, client_timeout=60, parameters=parameters or None)
    return {output.name: response.as_numpy(output.name) for output in response.get_response().outputs}


def test_any_client_of_the_protocol_gets_the_requested_outputs(served: Served) -> None:
    """docs/protocol.md: rows flat, feature-major, in the order asked for."""
    inputs = [("values", row(7, 3, 4, 1, 5, 6, 2)), ("lengths", lens(1, 0, 0, 2, 2, 2))]
    items, words = (served.module.rows.embeddings[name].weight.detach().numpy() for name in ("item", "word"))
    users = served.module.pooled.embedding_bags["user"].weight.detach().numpy()
    both = ask(served, inputs, features="words,recent,user_id")
    assert {name: value.shape for name, value in both.items()} == {"embeddings": (1, 2, 16), "sequences": (1, 96)}
    np.testing.assert_array_equal(both["sequences"][0], np.concatenate([words[[7]], items[[3, 4]]]).ravel())
    np.testing.assert_allclose(both["embeddings"][0], [users[1] + users[5], users[6] + users[2]], atol=1e-6)
    for name in both:
        (output,) = ask(served, inputs, [name], features="words,recent,user_id").items()
        assert output[0] == name
        np.testing.assert_array_equal(output[1], both[name])
    rows = ask(served, [("values", row(9, 8, 1)), ("lengths", lens(2, 1))], tables="user,word")
    assert rows.keys() == {"sequences"}
    np.testing.assert_array_equal(rows["sequences"][0], np.concatenate([users[[9, 8]].ravel(), words[1]]))
    assert ask(served, [("values", row(1)), ("lengths", lens(1))], features="user_id").keys() == {"embeddings"}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        pytest.param({"tables": "user,user"}, "table 'user': expected each table once, got it twice", id="twice"),
        pytest.param(
            {"tables": "recent"}, "table 'recent': expected one of 'user', 'genre', 'item', 'word'", id="unknown"
        ),
        pytest.param({"tables": ""}, "tables: expected at least one of 'user'", id="none"),
        pytest.param({"tables": 3}, "parameter tables: expected comma-separated names, got 3", id="a number"),
        pytest.param(
            {"tables": "user", "features": "recent"}, "expected the parameter features or tables", id="both"
        ),
    ],
)
def test_tables_that_cannot_be_asked_for_are_refused(served: Served, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(triton_errors.InferenceServerException, match=said) as caught:
        ask(served, [("values", row(1)), ("lengths", lens(1))], **parameters)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(triton_errors.InferenceServerException, match="tables: rows are answered in the output"):
        ask(served, [("values", row(1)), ("lengths", lens(1))], ["embeddings"], tables="user")


def test_a_line_of_json_is_answered_with_lists_of_rows(served: Served) -> None:
    request = {"words": [[7], [], [8, 9]], "user_id": [[1], [2], []]}
    done = tbe_serve("lookup", "m", "--url", served.server.grpc, stdin=json.dumps(request))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [len(rows) for rows in report["words"]] == [1, 0, 2]
    words = served.module.rows.embeddings["word"].weight.detach().numpy()
    np.testing.assert_array_equal(np.array(report["words"][2], np.float32), words[[8, 9]])
    table = tbe_serve("lookup", "m", "--url", served.server.grpc, "--table", stdin=json.dumps(request))
    assert table.stdout.count("words") == 3


@pytest.mark.long
def test_bench_checks_sequences(served: Served) -> None:
    options = ("--bundle", str(served.bundle), "--samples", "3", "--clients", "2", "--seconds", "0.5")
    done = tbe_serve("bench", "m", "--url", served.server.grpc, *options, "--repeats", "2", "--check", "1")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.long
def test_captured_requests_for_sequences_and_rows_are_replayed(tmp_path: Path) -> None:
    """By `bench --replay`, and to warm up."""
    module = Mixed()
    captured = tmp_path / "captured"
    captured.mkdir()
    serving = ServingSettings(capture=str(captured), capture_slow_ms=1e-6)
    bundle = export_model(module, tmp_path / "r", "m", replace(FP32, serving=serving))
    file = captured / "m.jsonl"
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        client.rows("item", [3, 4])
        client.lookup({"words": [[7], [8, 9]], "user_id": [[1], [2]]})
        with pytest.raises(InvalidRequest):
            client.rows("item", [300])
        until(lambda: file.exists() and file.read_text().count("\n") == 3, "three captured requests")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line.get("tables") for line in lines] == [["item"], None, ["item"]]
        options = (
            "--bundle",
            str(bundle),
            "--replay",
            str(file),
            "--clients",
            "1",
            "--seconds",
            "0.3",
            "--repeats",
            "2",
        )
        done = tbe_serve("bench", "m", "--url", server.grpc, *options, "--check", "1")
        assert "wrong" not in done.stderr, done.stderr
    done = tbe_serve("configure", str(bundle.parent), "--warm-up", str(file), "--no-capture", "--no-capture-slow-ms")
    assert done.returncode == 0, done.stderr
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        assert client.rows("item", [3]).shape == (1, 32)
