"""Deltas of a model whose tables lie on several hosts: each gets its rows and columns, under one number."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import (
    ExportConfig,
    Sharding,
    WeightDtype,
    compact,
    export_model,
    export_next,
    publish_changes,
    publish_delta,
    squash,
)
from serving.client import LookupClient
from serving.engine import Engine
from serving.model.settings import ServingSettings
from tests.support.hosts import MODEL, export_hosts, in_one_process
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection, random_bags
from tests.support.mutable_tables import PATIENCE_S, changed_rows
from tests.support.ranker import ranker
from tests.support.servers import metric, running


@pytest.mark.parametrize("dtype", one_in(2, [WeightDtype.INT8, WeightDtype.FP16]))
def test_a_router_answers_like_an_export_of_the_changed_model(dtype: WeightDtype, tmp_path: Path) -> None:
    """Of `a` each host has half of the rows, of `b` half of the columns; bit for bit, as one process."""
    model = collection(SUM)
    config = ExportConfig(
        dtype={"*": dtype},
        sharding=Sharding(ranks=2, ranks_per_host=1, types={"a": "row_wise", "b": "column_wise"}),
        serving=ServingSettings(weights_memory="live"),
    )
    router = export_hosts(tmp_path, model, config)
    random = np.random.default_rng(0)
    rows = changed_rows(model, random, lambda rows: rows // 2)
    publish_delta(tmp_path / "r", router.parent.name, rows)
    compact(tmp_path / "r", router.parent.name)  # version 2 has it, and goes on
    *before, last = (changed_rows(model, random, lambda rows: rows // 2) for _ in range(3))
    for rows in before:  # the fleet is there
        publish_delta(tmp_path / "r", router.parent.name, rows)
    squash(tmp_path / "r", router.parent.name)
    for path in (tmp_path / "r.deltas").rglob("000000000002.safetensors"):
        path.unlink()
    requests = [dict(random_bags(random, SUM, 10)) for _ in range(5)]
    memory = replace(config, serving=None)
    with Engine.open(in_one_process(tmp_path, model, memory, router)) as engine:
        answers = [engine.lookup(request) for request in requests]
    with (
        running(tmp_path / "r", "--local-hosts") as server,
        LookupClient(server.grpc, router.parent.name, 60) as client,
    ):
        assert metric(server, "tbe_delta_sequence", model=router.parent.name) == 3
        publish_delta(tmp_path / "r", router.parent.name, last)
        deadline = time.monotonic() + PATIENCE_S
        while not all(
            _same(client.lookup(request), answer) for request, answer in zip(requests, answers, strict=True)
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.long
def test_a_further_trained_dense_part_is_served_with_its_lineage_s_rows(tmp_path: Path) -> None:
    model = ranker()
    config = ExportConfig(
        scores=True,
        sharding=Sharding(
            ranks=2, ranks_per_host=1, hosts_as_models=True, types={"a": "row_wise", "b": "column_wise"}
        ),
        serving=ServingSettings(weights_memory="live"),
    )
    repository = tmp_path / "r"
    first = export_model(model, repository, MODEL, config)
    random = np.random.default_rng(0)
    publish_delta(repository, MODEL, changed_rows(model.embeddings, random, lambda rows: rows // 2))
    changed_rows(model.embeddings, random, lambda rows: rows // 2)
    with torch.no_grad():
        model.top.weight += 1
    export_next(model, repository, MODEL, config)
    changed_rows(model.embeddings, random, lambda rows: rows // 2)
    third = publish_changes(repository, MODEL, model, version=1)  # of either version
    assert third is not None
    assert third.sequence == 3
    memory = replace(config, serving=None)
    request = {feature: [[1, 2], [3]] for feature in ("x", "y", "z")}
    dense = {"user": np.ones((2, 3), np.float32), "item": np.ones((2, 2), np.float32)}
    with Engine.open(in_one_process(tmp_path, model, memory, first)) as engine:
        expected = engine.score(request, dense)
    with running(repository, "--local-hosts") as server, LookupClient(server.grpc, MODEL, 60) as client:
        assert metric(server, "tbe_delta_sequence", model=MODEL) == 3
        assert _same(client.score(request, dense), expected)
        changed_rows(model.embeddings, random, lambda rows: rows // 2)
        publish_changes(repository, MODEL, model)
        (tmp_path / "later").mkdir()
        with Engine.open(in_one_process(tmp_path / "later", model, memory, first)) as engine:
            expected = engine.score(request, dense)
        deadline = time.monotonic() + PATIENCE_S
        while not _same(client.score(request, dense), expected):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _same(answer: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(np.array_equal(answer[name], rows) for name, rows in expected.items())
