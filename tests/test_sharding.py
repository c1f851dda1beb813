"""Tables cut and copied over ranks every way there is answer as numpy does, and as one rank does."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.distributed.planner import ParameterConstraints

from export import ExportConfig, ExportError, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from export.errors import ConfigError, PlanError
from export.machine import memory_of
from export.pipeline import plan_model
from export.plan_report import PlanReport, report_plan
from export.sharding import CHOICES
from serving import kjt
from serving.engine import Engine, load_program
from serving.kjt import Tensors
from serving.plan import ShardingType
from tests import oracle
from tests.models import MIXED, Spec, collection, flat, random_bags, table_of

DTYPES = {
    "user": WeightDtype.INT8,
    "item": WeightDtype.INT4,
    "genre": WeightDtype.FP16,
    "word": WeightDtype.INT2,
}
# Dims that FBGEMM can pack, ones that no block of columns divides among them.
DIMS = {
    WeightDtype.FP32: [1, 4, 7, 10, 16, 40],
    WeightDtype.FP16: [2, 4, 7, 10, 16, 40],
    WeightDtype.INT8: [2, 4, 10, 16, 22, 40],
    WeightDtype.INT4: [4, 8, 12, 20, 40],
    WeightDtype.INT2: [8, 16, 24, 40],
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


@pytest.mark.timeout(900)
@given(case=cases())
@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
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
            oracle.exported_table(bundle, spec.name),
            bags[feature],
            spec.pooling,
            [each.tolist() for each in weights[feature]] if case.weighted else None,
        )
        assert rows.dtype == (np.float16 if half else np.float32)
        assert rows.shape == (case.samples, spec.dim)
        np.testing.assert_allclose(
            rows, expected, rtol=2**-10 if half else 1e-5, atol=(1 + case.longest) * (1e-3 if half else 1e-6)
        )


def _arrays(bags: list[list[int]], weights: list[npt.NDArray[np.float32]] | None) -> tuple[npt.NDArray[Any], ...]:
    values, lengths = flat({"": bags})
    return (values, lengths) if weights is None else (values, lengths, np.concatenate([np.empty(0, "f4"), *weights]))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    config = ExportConfig(dtype=DTYPES, id_policy={"word": IdPolicy.ZERO})
    return Engine.open(export_model(collection(MIXED), tmp_path_factory.mktemp("one") / "r", "m", config))


def sharded(tmp_path: Path, sharding: Sharding) -> Engine:
    config = ExportConfig(dtype=DTYPES, id_policy={"word": IdPolicy.ZERO}, sharding=sharding)
    return Engine.open(export_model(collection(MIXED), tmp_path / "r", "m", config))


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
        theirs = one_rank.lookup(bags)
        for feature, rows in engine.lookup(bags).items():
            if kind in CUTS_ROWS:
                ids = max((len(bag) for bag in bags[feature]), default=0)
                np.testing.assert_allclose(rows, theirs[feature], rtol=1e-5, atol=1e-5 * (1 + ids))
            else:
                np.testing.assert_array_equal(rows.view(np.uint32), theirs[feature].view(np.uint32))


def test_merging_requests_does_not_change_an_answer_from_many_ranks(tmp_path: Path) -> None:
    engine = sharded(tmp_path, Sharding(ranks=4, ranks_per_host=2, types={"*": "row_wise", "user": "grid_shard"}))
    random = np.random.default_rng(1)
    requests = []
    for features in (None, ["genres", "user_id"], ["words"], None, ["recent_items", "item_id"]):
        bags = random_bags(random, MIXED, 3, features, longest=20)
        values, lengths = flat(bags)
        requests.append(Tensors(list(bags), values, lengths))
    merged = kjt.merge(engine.schema, kjt.check([kjt.accept(engine.schema, request) for request in requests]))
    together = kjt.split(engine.run(merged), merged)
    for request, rows in zip(requests, together, strict=True):
        np.testing.assert_array_equal(engine.answer(request).view(np.uint32), rows.view(np.uint32))


def test_split_lookup_and_merge_are_methods_of_the_saved_program(tmp_path: Path, one_rank: Engine) -> None:
    """What a router and ranks on other hosts will call, on tensors alone."""
    import torch

    engine = sharded(tmp_path, Sharding(ranks=3, types={"*": "row_wise"}))
    program: Any = load_program(engine.bundle)
    program.weights_host = [
        torch.from_file(str(engine.bundle.path / rank.weights), size=size, dtype=torch.uint8)
        for rank in engine.bundle.manifest.plan.ranks
        if (size := (engine.bundle.path / rank.weights).stat().st_size)
    ]
    bags = random_bags(np.random.default_rng(2), MIXED, 5)
    values, lengths = flat(bags)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    parts = program.split(torch.from_numpy(values), offsets, None, None)
    assert sum(ids.numel() for ids, _, _ in parts) == values.size
    pooled = [program.lookup(rank, *part, None) for rank, part in enumerate(parts)]
    np.testing.assert_allclose(
        program.merge(pooled, offsets, None).numpy(),
        one_rank.answer(Tensors(None, values, lengths)),
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_plan_with_one_rank_is_one_call_whatever_it_is_called(tmp_path: Path) -> None:
    engine = sharded(tmp_path, Sharding(types={"*": "grid_shard"}))
    code = load_program(engine.bundle).code
    assert code.count("int_nbit_split_embedding_codegen_lookup_function") <= 1
    assert "permute" not in code
    assert "bucketize" not in code
    assert "index_add" not in code


def test_sizes_are_the_quantized_ones(tmp_path: Path) -> None:
    """Four ranks that hold a quarter of the int8 bytes each: a tenth less does not do."""
    spec = Spec("t", 10_000, 64, "SUM", ("x",))
    bytes_ = 10_000 * (64 + 4)

    def export(memory_bytes: int) -> Path:
        sharding = Sharding(ranks=4, memory_bytes=memory_bytes, types={"t": "row_wise"})
        return export_model(collection((spec,)), tmp_path / "r", "m", ExportConfig(sharding=sharding))

    with pytest.raises(PlanError) as refused:
        export(bytes_ // 4 - bytes_ // 40)
    assert str(refused.value) == (
        "table 't': a shard of it takes 170,112 bytes, 17,112 more than any of 4 ranks has left of its 153,000: all "
        "tables take 680,448 bytes: give more --memory-per-rank or --ranks, allow types that cut smaller, or store narrower dtypes"
    )
    manifest = Engine.open(export(bytes_ // 4 + 128)).bundle.manifest
    assert sum(manifest.files[rank.weights].size_bytes for rank in manifest.plan.ranks) == bytes_


def test_what_nobody_said_a_rank_can_hold_is_its_part_of_the_machine() -> None:
    """Or `auto` copies every table to every rank, for which it is fastest."""
    specs = [Spec(f"t{number}", 10_000, 64, "SUM", (f"x{number}",)) for number in range(4)]
    own = 4 * 10_000 * (64 + 4)

    def plan(machine_bytes: int) -> PlanReport:
        config = ExportConfig(sharding=Sharding(ranks=8, machine_bytes=machine_bytes))
        return report_plan(plan_model(collection(specs), config), config.sharding)

    roomy = plan(100 * own)
    assert (roomy.bytes, roomy.table_bytes, roomy.memory_bytes) == (8 * own, own, 100 * own // 8)
    assert roomy.notes == [
        "ranks hold 21.8 MB for 2.7 MB of tables, 8.0 times as much; most of it for 't0' (data_parallel) 4.8 MB, 't1' "
        "(data_parallel) 4.8 MB, 't2' (data_parallel) 4.8 MB: a smaller --memory-per-rank, or --sharding, has fewer "
        "copies",
        "a rank was taken to hold 34.0 MB, 1/8 of this machine's memory: --memory-per-rank says what yours can",
    ]
    tight = plan(own + own // 2)
    assert tight.bytes <= own + own // 2
    with pytest.raises(PlanError) as refused:
        plan(own // 2)
    assert str(refused.value).endswith(
        ": a rank was taken to hold 1/8 of this machine's 1,360,000 bytes: --memory-per-rank says what it can"
    )


def test_a_fleet_is_planned_on_any_machine() -> None:
    sharding = Sharding(ranks=8, machine_bytes=1000, memory_bytes=1 << 40)
    report = report_plan(plan_model(collection(MIXED), ExportConfig(sharding=sharding)), sharding)
    assert (report.memory_bytes, report.memory_assumed) == (1 << 40, False)
    assert not any("machine" in note for note in report.notes)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        pytest.param("", {}, 1000, id="no control group"),
        pytest.param("0::/\n", {"memory.max": "400\n"}, 400, id="a container's"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "300\n"}, 300, id="a parent's"),
        pytest.param("0::/a\n", {"a/memory.max": "5000\n", "b/memory.max": "1\n"}, 1000, id="above the machine's"),
        pytest.param(
            "4:cpu,memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": "9223372036854771712", "memory/memory.limit_in_bytes": "200"},
            200,
            id="version 1",
        ),
        pytest.param("4:cpu:/a\n", {"cpu/a/memory.limit_in_bytes": "7"}, 1000, id="another controller's"),
    ],
)
def test_a_machine_has_what_its_control_groups_allow(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
    assert memory_of(1000, tmp_path / "groups", tmp_path) == expected


def test_the_planner_cuts_what_does_not_fit_whole(tmp_path: Path) -> None:
    specs = (Spec("big", 10_000, 64, "SUM", ("x",)), Spec("small", 10, 64, "SUM", ("y",)))
    sharding = Sharding(ranks=4, ranks_per_host=2, memory_bytes=300_000)
    plan = Engine.open(
        export_model(collection(specs), tmp_path / "r", "m", ExportConfig(sharding=sharding))
    ).bundle.manifest.plan
    assert plan.sharding["big"] not in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    assert [rank.host for rank in plan.ranks] == [0, 0, 1, 1]


def test_auto_simple_is_the_rule_of_thumb(tmp_path: Path) -> None:
    specs = (
        Spec("long", 1001, 16, "SUM", ("a",)),
        Spec("wide", 1000, 40, "SUM", ("b",)),
        Spec("long_and_wide", 1001, 40, "SUM", ("c",)),
        Spec("plain", 1000, 32, "SUM", ("d",)),
    )
    sharding = Sharding(ranks=2, types={"*": "auto-simple"}, row_wise_over=1000, column_wise_over=32)
    bundle = export_model(collection(specs), tmp_path / "r", "m", ExportConfig(sharding=sharding))
    plan = Engine.open(bundle).bundle.manifest.plan
    assert {table: kind.value for table, kind in plan.sharding.items()} == {
        "long": "row_wise",
        "wide": "column_wise",
        "long_and_wide": "row_wise",
        "plain": "table_wise",
    }
    assert Sharding().row_wise_over == 1_000_000
    assert Sharding().column_wise_over == 256


def test_torchrec_s_constraints_are_taken_as_their_users_write_them(tmp_path: Path) -> None:
    constraints = {
        "user": ParameterConstraints(sharding_types=["column_wise"], min_partition=4, compute_kernels=["quant"]),
        "item": ParameterConstraints(sharding_types=["table_row_wise"], pooling_factors=[3.0, 20.0]),
    }
    plan = sharded(tmp_path, Sharding(ranks=4, ranks_per_host=2, constraints=constraints)).bundle.manifest.plan
    assert plan.sharding["user"] is ShardingType.COLUMN_WISE
    assert {shard.width for shard in plan.shards_by_table["user"]} == {4}
    assert plan.sharding["item"] is ShardingType.TABLE_ROW_WISE
    assert len({plan.ranks[shard.rank].host for shard in plan.shards_by_table["item"]}) == 1


EXPLICIT: dict[str, Any] = {
    "ranks": [{"host": 0}, {"host": 3}],
    "tables": {
        "user": {
            "sharding_type": "row_wise",
            "shards": [
                {"rank": 1, "rows": [0, 7], "columns": [0, 16]},
                {"rank": 0, "rows": [7, 500], "columns": [0, 16]},
            ],
        },
        "item": {
            "sharding_type": "column_wise",
            "shards": [
                {"rank": 0, "rows": [0, 300], "columns": [20, 32]},
                {"rank": 0, "rows": [0, 300], "columns": [0, 20]},
            ],
        },
        "genre": {
            "sharding_type": "data_parallel",
            "shards": [
                {"rank": 0, "rows": [0, 20], "columns": [0, 8]},
                {"rank": 1, "rows": [0, 20], "columns": [0, 8]},
            ],
        },
        "word": {"sharding_type": "table_wise", "shards": [{"rank": 1, "rows": [0, 1000], "columns": [0, 24]}]},
    },
}


def written(tmp_path: Path, plan: Any) -> Sharding:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return Sharding(plan=tmp_path / "plan.json")


def test_an_explicit_plan_is_done_as_it_says(tmp_path: Path, one_rank: Engine) -> None:
    """Uneven blocks of rows, columns in any order on one rank."""
    engine = sharded(tmp_path, written(tmp_path, EXPLICIT))
    plan = engine.bundle.manifest.plan
    assert [rank.host for rank in plan.ranks] == [0, 3]
    assert [(s.table, s.rank, list(s.rows), list(s.columns)) for s in plan.shards] == [
        (table, shard["rank"], shard["rows"], shard["columns"])
        for table in ("user", "item", "genre", "word")
        for shard in EXPLICIT["tables"][table]["shards"]
    ]
    bags = random_bags(np.random.default_rng(3), MIXED, 50)
    for feature, rows in engine.lookup(bags).items():
        np.testing.assert_allclose(rows, one_rank.lookup(bags)[feature], rtol=1e-5, atol=1e-5)


def _edited(edit: str) -> Any:
    plan = msgspec.json.decode(msgspec.json.encode(EXPLICIT))
    exec(edit, {"plan": plan, "tables": plan["tables"]})
    return plan


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param("del tables['word']", "table 'word': expected it in the plan", id="a-table-missing"),
        pytest.param("tables['x'] = tables['word']", "table 'x': the model has no such table", id="unknown-table"),
        pytest.param("tables['word']['shards'][0]['rank'] = 2", "no rank 2: expected one of 2", id="no-such-rank"),
        pytest.param(
            "tables['word']['shards'][0]['rows'] = [0, 999]",
            r"'word' \(1000 × 24\): its shards do not cover rows exactly once: look at row 999",
            id="rows-left-over",
        ),
        pytest.param(
            "tables['user']['shards'][0]['rows'] = [0, 8]",
            "do not cover rows exactly once: look at row 7",
            id="rows-twice",
        ),
        pytest.param(
            "tables['item']['shards'][0]['columns'] = [24, 32]",
            "do not cover columns exactly once: look at column 20",
            id="columns-left-over",
        ),
        pytest.param(
            "tables['item']['shards'][0]['columns'][0] = tables['item']['shards'][1]['columns'][1] = 18",
            r"columns cut at multiples of 4, got \[18, 32\]",
            id="columns-cut-inside-a-byte",
        ),
        pytest.param("tables['genre']['shards'].pop()", "whole copy on each of 2 ranks", id="a-copy-missing"),
        pytest.param("tables['word']['shards'] = []", "do not cover columns", id="no-shards"),
        pytest.param("tables['word']['sharding_type'] = 'x'", "Invalid enum value 'x'", id="unknown-type"),
        pytest.param("plan['ranks'] = []", "ranks: expected at least one", id="no-ranks"),
        pytest.param("del plan['tables']", "missing required field `tables`", id="not-a-plan"),
    ],
)
def test_an_explicit_plan_that_is_not_one_is_refused_by_name(tmp_path: Path, edit: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharded(tmp_path, written(tmp_path, _edited(edit)))
    assert not (tmp_path / "r").exists()


def test_an_explicit_plan_that_does_not_fit_says_where_and_by_how_much(tmp_path: Path) -> None:
    plan = written(tmp_path, EXPLICIT).plan
    with pytest.raises(
        PlanError, match=r"rank 0 would hold 17,380 bytes, 7,380 more than its 10,000: .* 9,860 bytes of table 'user'"
    ):
        sharded(tmp_path, Sharding(plan=plan, memory_bytes=10_000))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Sharding(ranks=0), "ranks: expected 1 to 10000, got 0", id="no-ranks"),
        pytest.param(
            lambda: Sharding(ranks=6, ranks_per_host=4), "expected a divisor of 6 ranks, got 4", id="uneven-hosts"
        ),
        pytest.param(lambda: Sharding(types={"*": "rowwise"}), "expected one of auto, auto-simple", id="no-type"),
        pytest.param(lambda: Sharding(min_partition={"*": 6}), "a multiple of 4 columns, got 6", id="partition"),
        pytest.param(lambda: Sharding(plan=Path("p"), ranks=2), "plan: expected no ranks", id="plan-and-ranks"),
        pytest.param(
            lambda: Sharding(pooling_factors={"*": -1.0}), "expected >= 0 and below 1000000, got -1", id="pooling"
        ),
    ],
)
def test_a_sharding_that_contradicts_itself_is_refused_where_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_pooling_factors_for_other_features_than_there_are_are_refused(tmp_path: Path) -> None:
    constraints = {"item": ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0])}
    with pytest.raises(ConfigError, match=r"pooling_factors for its 2 features \(item_id, recent_items\), got 3"):
        sharded(tmp_path, Sharding(ranks=2, constraints=constraints))


def test_settings_of_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="types 'usr': expected the name of a table or a glob"):
        sharded(tmp_path, Sharding(ranks=2, types={"usr": "row_wise"}))
