"""Outputs that a model calls as the protocol calls tensors of lookups: they are served by another name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.bundle.scores import RESERVED
from serving.engine import Engine
from tests.support.models import SUM, collection
from tests.support.scored_models import EXACT

IDS = {"x": [[1, 2], [3]], "y": [[4], []], "z": [[5], [6]]}


class Named(nn.Module):
    names: tuple[str, ...] = RESERVED

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(SUM)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        total = self.bags(ids).values().sum(1)
        return {name: total * (number + 1) for number, name in enumerate((*self.names, "total"))}


class Twice(Named):
    names = ("values", "scores.values")


class Own(nn.Module):
    def forward(self, pooled: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"values": pooled["x"].sum(1), "other": pooled["z"].sum(1)}


def keyed() -> KeyedJaggedTensor:
    flat = [id_ for column in IDS.values() for bag in column for id_ in bag]
    lengths = torch.tensor([len(bag) for column in IDS.values() for bag in column], dtype=torch.int32)
    return KeyedJaggedTensor([*IDS], torch.tensor(flat), lengths=lengths)


@pytest.mark.parametrize("example", [None, (keyed(),)], ids=["without an example", "with one"])
def test_outputs_named_like_lookup_tensors_are_renamed(example: Any, tmp_path: Path) -> None:
    module = Named().eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=example)
    with Engine.open(bundle) as engine, torch.no_grad():
        answer, notes = engine.score(IDS), engine.bundle.manifest.notes
        assert [*answer] == [*(f"scores.{name}" for name in RESERVED), "total"]
        for name, numbers in module(keyed()).items():
            served = name if name == "total" else f"scores.{name}"
            np.testing.assert_allclose(answer[served], numbers.numpy(), atol=1e-5)
        assert any("the output values is called scores.values" in note for note in notes)


class Nested(Named):
    def forward(self, ids: KeyedJaggedTensor) -> Any:
        total = self.bags(ids).values().sum(1)
        return total, {"again": total * 2, "more": [total * 3]}


class OwnNested(nn.Module):
    def forward(self, pooled: dict[str, Tensor]) -> tuple[Tensor, dict[str, list[Tensor]]]:
        total = torch.cat([pooled["x"], pooled["y"], pooled["z"]], dim=1).sum(1)
        return total, {"again": [total * 2, total * 3]}


@pytest.mark.parametrize(
    ("ways", "names"),
    [
        ({}, ["scores_0", "scores_1.again", "scores_1.more_0"]),
        ({"example": (keyed(),)}, ["scores_0", "scores_1.again", "scores_1.more_0"]),
        ({"dense": OwnNested()}, ["scores_0", "scores_1.again_0", "scores_1.again_1"]),
    ],
    ids=["without an example", "with one", "own module"],
)
def test_nested_answers_join_their_names(ways: Any, names: list[str], tmp_path: Path) -> None:
    module = Nested().eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, **ways)
    with Engine.open(bundle) as engine, torch.no_grad():
        scores = engine.score(IDS)
        total = module(keyed())[0].numpy()
    assert [*scores] == names
    for factor, name in enumerate(names, 1):
        np.testing.assert_allclose(scores[name], factor * total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("example", [None, (keyed(),)], ids=["without an example", "with one"])
def test_a_name_that_another_output_has_is_refused(example: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Twice: .*values'"):
        export_model(Twice().eval(), tmp_path / "r", "m", EXACT, example=example)


def test_a_dense_module_of_the_user_may_use_the_served_names(tmp_path: Path) -> None:
    config = replace(EXACT, dense_widths={})
    bundle = export_model(Named().eval(), tmp_path / "r", "m", config, dense=Own())
    with Engine.open(bundle) as engine, torch.no_grad():
        answer = engine.score(IDS)
        pooled = Named().bags(keyed()).to_dict()
        np.testing.assert_allclose(answer["scores.values"], pooled["x"].sum(1).numpy(), atol=1e-5)
        np.testing.assert_allclose(answer["other"], pooled["z"].sum(1).numpy(), atol=1e-5)
