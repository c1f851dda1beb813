"""Rankers in which user and items meet at random places: each answers as by itself, alone, merged, in any order."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import ExportConfig, export_model
from serving.bundle.tables import OutputDtype
from serving.engine import Engine
from serving.lookup import user_side
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from tests.support.random_user_sides import USER_SIDE, Meeting, meeting
from tests.support.scored_models import EXACT
from tests.support.shared import Ranking, ranking
from tests.support.user_sides import used_from

# Of the first 60, those that have between them nearly every two things that may be drawn. RANDOM_MODELS=300 makes more.
CHOSEN = (5, 6, 9, 11, 14, 18, 20, 21, 23, 24, 25, 34, 36, 40, 41, 43, 47, 48, 51, 52, 55, 56)
LONG = (*CHOSEN, *range(60, int(os.environ.get("RANDOM_MODELS", "60"))))
# All of these are computed once per user.
ONCE_PER_USER = range(20)
# The items of each request: fewer than are worth it, one slice, several, and several of which two overlap.
SIZES = (3, 16, 21, 39)


@pytest.mark.parametrize("seed", [0, 10, *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG)])
def test_random_rankers_answer_as_by_themselves(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_side, "SLICES", (16, 8, 4))
    module = meeting(seed)
    config = replace(EXACT, user_side=USER_SIDE, output_dtype=OutputDtype.FP16 if seed % 7 == 6 else OutputDtype.FP32)
    with used_from(16):
        bundle = export_model(module, tmp_path, "m", config, example=_example(module))
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        # Of few, a probe shows more rounding than it allows between samples in another order.
        assert (part.user_side is None) == part.mixes_samples, engine.bundle.manifest.notes
        assert seed not in ONCE_PER_USER or part.user_side is not None
        every = [
            ranking(module, USER_SIDE, *module.request(np.random.default_rng((seed, size)), size)) for size in SIZES
        ]
        tensors = []
        used = [tensor.name for tensor in part.inputs]
        for bags, every_dense, right in every:
            dense = {name: every_dense[name] for name in used}
            answer = engine.score(bags, dense, shared=USER_SIDE)
            _expect_right(answer, right, every, config)
            encoded = encode(bags, [], USER_SIDE)
            tensors.append(replace(encoded, outputs=[*answer], dense=encode_dense(part.inputs, dense)))
        order = np.random.default_rng(seed).permutation(len(every)).tolist()
        answers = engine.answer([accept(engine.schema, tensors[number]) for number in order]).outcomes()
        for number, merged in zip(order, answers, strict=True):
            assert isinstance(merged, Mapping), merged
            _expect_right(merged, every[number].right, every, config)


def _example(module: Meeting) -> tuple[Any, ...]:
    return module.arguments(*module.request(np.random.default_rng(module.seed), 7))


def _expect_right(
    answer: Mapping[str, Any], right: Mapping[str, Any], every: list[Ranking], config: ExportConfig
) -> None:
    """But for rounding, relative to the largest number of all answers."""
    limit = 1e-5 if config.output_dtype is OutputDtype.FP32 else 1e-2
    for name, numbers in answer.items():
        largest = max(float(np.abs(request.right[name]).max(initial=0)) for request in every)
        np.testing.assert_allclose(numbers, right[name], rtol=0, atol=limit * largest, err_msg=name)
