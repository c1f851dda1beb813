"""Tables cut and copied over ranks every way there is answer as numpy does, and as one rank does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export import ExportConfig, OutputDtype, Sharding, WeightDtype, export_model
from export.plan.sharding import CHOICES
from serving.bundle.load import weights_path
from serving.bundle.plan import ShardingType
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.lookup.program import load_program
from serving.requests.accept import accept
from serving.requests.merge import merge
from serving.requests.types import Tensors
from serving.requests.validate import validate
from tests.support import bundle_reader, oracle
from tests.support.long_cases import fewer_examples
from tests.support.models import MIXED, Spec, collection, flat, random_bags, table_of
from tests.support.sharded_exports import sharded

pytestmark = pytest.mark.usefixtures("any_torchscript")

# Dims that FBGEMM can pack, ones that no block of columns divides among them.
DIMS = {
    dtype: [dim for dim in (1, 2, 4, 7, 8, 10, 12, 16, 20, 22, 24, 40) if dim % dtype.format.dim_multiple == 0]
    for dtype in WeightDtype
}

CUTS_ROWS = {ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD}


@dataclass(frozen=True)
class Case:
    specs: tuple[Spec, ...]
    weighted: bool
    config: ExportConfig
    samples: int
    longest: int
    features: tuple[str, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = [f"t{number}" for number in range(draw(st.integers(1, 5)))]
    dtypes = {name: draw(st.sampled_from(WeightDtype)) for name in names}
    specs = tuple(
        Spec(
            name,
            draw(st.sampled_from([1, 2, 3, 7, 8, 20, 100])),
            draw(st.sampled_from(DIMS[dtypes[name]])),
            draw(st.sampled_from(["SUM", "MEAN"])),
            tuple(f"{name}_{reader}" for reader in range(draw(st.integers(1, 2)))),
        )
        for name in names
    )
    ranks = draw(st.integers(1, 8))
    sharding = Sharding(
        ranks=ranks,
        ranks_per_host=draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])),
        types={name: draw(st.sampled_from(CHOICES)) for name in names},
        row_wise_over=20,
        column_wise_over=16,
    )
    features = [feature for spec in specs for feature in spec.features]
    order = draw(st.permutations(features))
    return Case(
        specs=specs,
        weighted=draw(st.booleans()),
        config=ExportConfig(
            dtype=dtypes,
            output_dtype=draw(st.sampled_from(OutputDtype)),
            sharding=sharding,
        ),
        samples=draw(st.sampled_from([0, 1, 2, 5])),
        longest=draw(st.sampled_from([0, 1, 4, 30])),
        features=tuple(draw(st.sampled_from([features, order, order[: len(order) // 2 + 1]]))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@fewer_examples
@given(case=cases())
def test_any_tables_under_any_plan_answer_as_numpy(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    module = collection(case.specs, weighted=case.weighted, seed=case.seed % 1000)
    bundle = export_model(module, tmp_path_factory.mktemp("plan") / "r", "m", case.config)
    random = np.random.default_rng(case.seed)
    bags = random_bags(random, case.specs, case.samples, case.features, case.longest)
    weights = {name: [random.normal(size=len(bag)).astype(np.float32) for bag in bags[name]] for name in bags}
    request: dict[str, Any] = {name: _arrays(bags[name], weights[name] if case.weighted else None) for name in bags}
    half = case.config.output_dtype is OutputDtype.FP16

    answers = Engine.open(bundle).lookup(request)

    assert tuple(answers) == case.features
    for feature, rows in answers.items():
        spec = table_of(case.specs)[feature]
        expected = oracle.pool(
            bundle_reader.exported_table(bundle, spec.name),
            bags[feature],
            spec.pooling,
            [bag_weights.tolist() for bag_weights in weights[feature]] if case.weighted else None,
        )
        assert rows.dtype == (np.float16 if half else np.float32)
        assert rows.shape == (case.samples, spec.dim)
        np.testing.assert_allclose(
            rows, expected, rtol=2**-10 if half else 1e-5, atol=(1 + case.longest) * (1e-3 if half else 1e-6)
        )


def _arrays(bags: list[list[int]], weights: list[npt.NDArray[np.float32]] | None) -> tuple[npt.NDArray[Any], ...]:
    values, lengths = flat({"": bags})
    return (values, lengths) if weights is None else (values, lengths, np.concatenate([np.empty(0, "f4"), *weights]))


@pytest.mark.parametrize("kind", list(ShardingType))
def test_every_type_answers_what_one_rank_answers(tmp_path: Path, one_rank: Engine, kind: ShardingType) -> None:
    """Bit for bit where rows stay whole, empty bags, no samples and a bag of 100,000 ids included."""
    engine = sharded(tmp_path, Sharding(ranks=8, ranks_per_host=4, types={"*": kind.value}))
    manifest = engine.bundle.manifest
    assert set(manifest.plan.sharding.values()) == {kind}
    assert len(manifest.plan.shards) > len(manifest.tables) or kind is ShardingType.TABLE_WISE
    random = np.random.default_rng(0)
    long = {"user_id": [random.integers(0, 500, 100_000).tolist(), []], "words": [[], [5, 2**40, -1]]}
    requests = [
        long,
        random_bags(random, MIXED, 0),
        random_bags(random, MIXED, 1, longest=0),
        random_bags(random, MIXED, 64, longest=60),
        random_bags(random, MIXED, 3, ["words", "user_id"]),
    ]
    for bags in requests:
        alone = one_rank.lookup(bags)
        for feature, rows in engine.lookup(bags).items():
            if kind in CUTS_ROWS:
                ids = max((len(bag) for bag in bags[feature]), default=0)
                np.testing.assert_allclose(rows, alone[feature], rtol=1e-5, atol=1e-5 * (1 + ids))
            else:
                np.testing.assert_array_equal(rows.view(np.uint32), alone[feature].view(np.uint32))


def test_merging_changes_no_answer_of_many_ranks(tmp_path: Path) -> None:
    engine = sharded(tmp_path, Sharding(ranks=4, ranks_per_host=2, types={"*": "row_wise", "user": "grid_shard"}))
    random = np.random.default_rng(1)
    requests = []
    for features in (None, ["genres", "user_id"], ["words"], None, ["recent_items", "item_id"]):
        bags = random_bags(random, MIXED, 3, features, longest=20)
        values, lengths = flat(bags)
        requests.append(Tensors(list(bags), values, lengths))
    merged = merge(engine.schema, validate([accept(engine.schema, request) for request in requests]))
    together = merged.unmerge(engine.ranks.answer([merged])[0].embeddings)
    for request, rows in zip(requests, together, strict=True):
        np.testing.assert_array_equal(engine.outputs(request)[EMBEDDINGS].view(np.uint32), rows.view(np.uint32))


def test_split_lookup_and_merge_are_methods_of_the_saved_program(tmp_path: Path, one_rank: Engine) -> None:
    """What a router and ranks on other hosts will call, on tensors alone."""
    import torch

    engine = sharded(tmp_path, Sharding(ranks=3, types={"*": "row_wise"}))
    weights = [
        torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        for path in (weights_path(engine.bundle.path, engine.bundle.manifest, rank) for rank in range(3))
    ]
    program = load_program(engine.bundle, weights, methods=("split", "lookup", "merge")).program
    bags = random_bags(np.random.default_rng(2), MIXED, 5)
    values, lengths = flat(bags)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    parts = program.split(torch.from_numpy(values), offsets, None, None)
    assert sum(ids.numel() for ids, _, _ in parts) == values.size
    pooled = [program.lookup(rank, *part, None) for rank, part in enumerate(parts)]
    np.testing.assert_allclose(
        program.merge(pooled, offsets, None).numpy(),
        one_rank.outputs(Tensors(None, values, lengths))[EMBEDDINGS],
        rtol=1e-5,
        atol=1e-5,
    )
