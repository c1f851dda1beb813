"""The programs of a user side in this process: which requests they score, and where they cannot be loaded."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from export import export_model
from serving.engine import Engine
from serving.errors import BundleError
from serving.lookup import user_side
from serving.lookup.user_side import UserSidePrograms
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from serving.requests.limits import sequence_bytes
from serving.requests.schema import ScoringSchema
from serving.requests.types import Array, Embeddings, Outputs
from tests.support.random_user_sides import USER_SIDE, Meeting, meeting
from tests.support.scored_models import EXACT
from tests.support.shared import Ranking, ranking
from tests.support.user_sides import used_from


@pytest.fixture(scope="module")
def module() -> Meeting:
    return meeting(28)


@pytest.fixture(scope="module")
def bundle(module: Meeting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    example = module.arguments(*module.request(np.random.default_rng(0), 7))
    config = replace(EXACT, user_side=USER_SIDE)
    with used_from(16):
        return export_model(module, tmp_path_factory.mktemp("user_side"), "m", config, example=example)


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.open(bundle) as engine:
        yield engine


def of_items(module: Meeting, items: int) -> Ranking:
    return ranking(module, USER_SIDE, *module.request(np.random.default_rng(items), items))


def expect_right(engine: Engine, request: Ranking) -> None:
    answer = engine.score(request.bags, request.dense, shared=USER_SIDE)
    for name, numbers in answer.items():
        np.testing.assert_allclose(numbers, request.right[name], rtol=0, atol=1e-5)


def test_requests_with_16_items_or_more_use_the_user_side_programs(
    module: Meeting, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    score = UserSidePrograms.score

    def counted(self: UserSidePrograms, embeddings: Embeddings, inputs: Sequence[Array]) -> Outputs:
        scored.append(len(embeddings))
        return score(self, embeddings, inputs)

    monkeypatch.setattr(UserSidePrograms, "score", counted)
    for items in (1, 15, 16, 64, 257, 500):
        expect_right(engine, of_items(module, items))
    assert scored == [16, 64, 257, 500]


@pytest.mark.parametrize("fewest", [None, 64])
def test_the_whole_dense_part_scores_where_the_export_found_it_faster(
    module: Meeting, tmp_path: Path, fewest: int | None
) -> None:
    example = module.arguments(*module.request(np.random.default_rng(0), 7))
    with used_from(fewest):
        bundle = export_model(module, tmp_path, "m", replace(EXACT, user_side=USER_SIDE), example=example)
    with Engine.open(bundle) as engine:
        assert isinstance(engine.schema, ScoringSchema)
        for items in (63, 64, 300):
            request = of_items(module, items)
            encoded = encode(request.bags, [], USER_SIDE)
            dense = encode_dense(engine.schema.dense_part.inputs, request.dense)
            accepted = accept(engine.schema, replace(encoded, outputs=["click"], dense=dense))
            assert accepted.is_user_side == (fewest is not None and items >= fewest)
            expect_right(engine, request)


def test_a_history_counts_once_towards_the_limit_of_bytes(module: Meeting, engine: Engine) -> None:
    assert isinstance(engine.schema, ScoringSchema)
    part = engine.schema.dense_part
    sizes = {}
    for items in (20, 40):
        request = of_items(module, items)
        encoded = encode({**request.bags, "history": [[1, 2, 3, 4]]}, [], USER_SIDE)
        tensors = replace(encoded, outputs=["click"], dense=encode_dense(part.inputs, request.dense))
        sizes[items] = sequence_bytes(accept(engine.schema, tensors))
    rows = 4 * 8 * 4 + 4  # of the history, with its length
    assert sizes[40] - rows == 2 * (sizes[20] - rows)


def test_the_whole_dense_part_scores_if_user_side_programs_do_not_load(
    module: Meeting, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(user_side, "load_user_side", fail)
    with Engine.open(bundle) as engine:
        assert engine.dense_part is not None
        (failure,) = engine.dense_part.failures
        assert failure.startswith(f"{bundle / 'scores.user.pt'}: torch ")
        assert failure.endswith(" cannot load it: RuntimeError: no such operator")
        assert isinstance(engine.schema, ScoringSchema)
        assert engine.schema.dense_part.user_side is None
        expect_right(engine, of_items(module, 40))


def test_programs_of_another_user_side_are_refused(bundle: Path, tmp_path: Path) -> None:
    """They would read the first item's inputs for those of all, and nothing else would show it."""
    copied = Path(shutil.copytree(bundle, tmp_path / "m" / "1"))
    manifest = json.loads((copied / "manifest.json").read_text())
    names = manifest["dense_part"]["user_side"]["names"]
    manifest["dense_part"]["user_side"]["names"] = names[1:]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    message = (
        f"scores.user.pt: expected a program for the user side {names[1:]}, got one for {names}: export it again"
    )
    with pytest.raises(BundleError, match=re.escape(message)):
        Engine.open(copied)


@pytest.mark.parametrize("may_overlap", [True, False])
def test_slices_cover_all_items_in_few_sizes(may_overlap: bool) -> None:
    for items in range(1, 1200):
        slices = user_side.slices_of(items, may_overlap=may_overlap)
        assert {item for first, last in slices for item in range(first, last)} == {*range(items)}
        assert all(last - first in user_side.SLICES for first, last in slices[:-1])
        twice = sum(last - first for first, last in slices) - items
        assert 0 <= twice <= items / 7 * may_overlap
        first, last = slices[-1]
        assert last - first in user_side.SLICES or last - first < min(user_side.SLICES)


def test_rows_for_each_id_are_in_one_slice_alone() -> None:
    assert user_side.slices_of(500, may_overlap=True) == [(0, 256), (244, 500)]
    assert user_side.slices_of(500, may_overlap=False) == [(0, 256), (256, 384), (384, 448), (448, 500)]
