"""The user side once: what a request brings once counts as if it were repeated for each sample."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from serving.bundle.tensor_names import EMBEDDINGS, SEQUENCES, SHARED
from serving.client import JaggedRows
from serving.engine import Engine
from serving.errors import IdsOutside, InvalidRequest
from serving.model.settings import ServingSettings
from serving.requests.types import Tensors
from tests.support.long_cases import one_in
from tests.support.managed_collision import KEYS, bags_of, managed
from tests.support.merged_answers import merged_answers
from tests.support.models import MIXED, MIXED_CONFIG, Bags, collection, flat, random_bags
from tests.support.position_weights import LONGEST, positioned
from tests.support.position_weights import SPECS as POSITIONED
from tests.support.scored_models import EXACT, Centred, dlrm_dcn, own_scores, random_request, two_tower
from tests.support.sequence_models import POOLED, ROWS, Mixed, kjt_of
from tests.support.shared import assert_scores, pairs, repeated

FP32 = ExportConfig(dtype={"*": WeightDtype.FP32})
SHARDED = Sharding(
    ranks=4,
    ranks_per_host=2,
    types={"user": "row_wise", "genre": "data_parallel", "item": "grid_shard", "word": "table_row_wise"},
)
Draw = Callable[[np.random.Generator, int], dict[str, Bags]]


def of_specs(specs: Any) -> Draw:
    return lambda random, samples: random_bags(random, specs, samples)


def short(random: np.random.Generator, samples: int) -> dict[str, Bags]:
    """Bags as long as their position weights; two tables read `recent`."""
    bags = random_bags(random, POSITIONED, samples)
    return {key: [[id_ % 300 for id_ in bag[: LONGEST[key]]] for bag in column] for key, column in bags.items()}


def outside(draw: Draw) -> Draw:
    """Some ids are in no table."""

    def drawn(random: np.random.Generator, samples: int) -> dict[str, Bags]:
        bags = draw(random, samples)
        for bag in (bag for key in ("words", "recent") for bag in bags[key] if bag):
            bag[0] = int(random.choice([-1, 10**6, bag[0]]))
        return bags

    return drawn


MODELS: dict[str, tuple[Callable[[], Any], ExportConfig, Draw]] = {
    "pooled and sequences": (Mixed, FP32, of_specs((*POOLED, *ROWS))),
    "sharded": (Mixed, replace(FP32, sharding=SHARDED, output_dtype=OutputDtype.FP16), of_specs((*POOLED, *ROWS))),
    "ids outside": (
        Mixed,
        replace(FP32, id_policy={"item": IdPolicy.ZERO, "word": IdPolicy.MODULO}),
        outside(of_specs((*POOLED, *ROWS))),
    ),
    "weighted": (lambda: collection(MIXED, weighted=True), MIXED_CONFIG, of_specs(MIXED)),
    "weighted by position": (positioned, FP32, short),
    "raw ids": (managed, FP32, lambda random, samples: bags_of(random, samples, KEYS)),
}


def weight_of(ids: Any) -> Any:
    return np.array(ids, np.float32) % 7 / 8


def request_of(bags: Mapping[str, Bags], shared: Sequence[str], weighted: bool) -> Tensors:
    values, lengths = flat(bags)
    return Tensors(tuple(bags), values, lengths, weight_of(values) if weighted else None, shared=shared)


def outputs_of_pairs(engine: Engine, bags: Mapping[str, Bags], shared: Sequence[str], samples: int) -> dict[str, Any]:
    """What a request should be answered with, from the answer to one that repeats the user for each item. Where there
    is no item, the user gets one that has no ids."""
    pairs: Any = repeated({key: column or [[]] for key, column in bags.items()}, shared, max(samples, 1))
    if engine.schema.weighted:
        pairs = {
            key: {
                "values": (ids := [id_ for bag in column for id_ in bag]),
                "lengths": [len(bag) for bag in column],
                "weights": weight_of(ids),
            }
            for key, column in pairs.items()
        }
    outputs: dict[str, list[Any]] = {EMBEDDINGS: [], SHARED: [], SEQUENCES: []}
    feature_set = engine.schema.select(tuple(bags))
    answer = engine.lookup(pairs)
    for feature, key in zip(feature_set.names, feature_set.key_of, strict=True):
        rows = answer[feature]
        if isinstance(rows, JaggedRows):
            outputs[SEQUENCES].append((rows.rows(0) if key in shared else rows.values).ravel())
        else:
            outputs[SHARED if key in shared else EMBEDDINGS].append(rows[: 1 if key in shared else samples])
    return {name: np.concatenate(parts, axis=-1) for name, parts in outputs.items() if parts}


@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_shared_features_are_answered_as_repeated_ones(name: str, tmp_path: Path) -> None:
    """Requests of all kinds, merged: with and without samples, of some keys in any order, which come once or do not."""
    make, config, draw = MODELS[name]
    bundle = export_model(make(), tmp_path / "r", "m", config)
    engine = Engine.open(bundle)
    random = np.random.default_rng(0)
    cases = []
    for number in range(40):
        samples = number % 5
        user, items = draw(random, 1), draw(random, samples)
        keys = random.permutation([*items])[: random.integers(1, len(items) + 1)].tolist()
        shared = random.permutation(keys)[: random.integers(0, len(keys) + 1)].tolist()
        bags = {key: user[key] if key in shared else items[key] for key in keys}
        cases.append((bags, shared, 1 if len(shared) == len(keys) else samples))
    requests = [request_of(bags, shared, engine.schema.weighted) for bags, shared, _ in cases]
    for (bags, shared, samples), request, outcome in zip(
        cases, requests, merged_answers(bundle, requests), strict=True
    ):
        expected, alone = outputs_of_pairs(engine, bags, shared, samples), engine.outputs(request)
        assert outcome.keys() == alone.keys() == expected.keys()
        for output, numbers in expected.items():
            np.testing.assert_array_equal(outcome[output], numbers, err_msg=output)
            np.testing.assert_array_equal(alone[output], numbers, err_msg=output)


def test_a_ranking_request_is_answered_as_torchrec_answers_each_pair(tmp_path: Path) -> None:
    """The oracle is the module itself, on one sample at a time."""
    module = Mixed()
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    random = np.random.default_rng(3)
    user, items = random_bags(random, (*POOLED, *ROWS), 1), random_bags(random, (*POOLED, *ROWS), 9)
    shared = ["genres", "recent"]
    request = {key: user[key] if key in shared else items[key] for key in ("words", "genres", "user_id", "recent")}
    answer = engine.lookup(request, shared=shared)
    assert list(answer) == list(request)
    assert (answer["genres"].shape, len(answer["recent"])) == ((1, 8), 1)
    for sample in range(9):
        sample_features = {
            key: column[:1] if key in shared else column[sample : sample + 1] for key, column in request.items()
        }
        pair = kjt_of({"seen": [[]], **sample_features})
        with torch.no_grad():
            sums, rows = module.pooled(pair).to_dict(), module.rows(pair)
        np.testing.assert_allclose(answer["genres"], sums["genres"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(answer["user_id"][[sample]], sums["user_id"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(answer["recent"].rows(0), rows["recent"].values())
        np.testing.assert_array_equal(answer["words"].rows(sample), rows["words"].values())


INTS = np.arange(6)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(Mixed(), tmp_path_factory.mktemp("mixed") / "r", "m", FP32)


@pytest.mark.parametrize(
    ("lengths", "parameters", "why"),
    [
        ([2, 1, 1, 2], {"shared": ["nobody"]}, "once: 'nobody': expected one of 'user_id', 'genres', 'recent'"),
        ([2, 1, 1, 2], {"shared": ["words"]}, "once: 'words': expected one of 'user_id', "),
        ([2, 1, 1, 2], {"shared": ["user_id", "user_id"]}, "once: expected each name once, got 'user_id', 'user_id'"),
        ([2, 1, 1, 1, 1, 0], {"shared": ["genres"]}, "lengths: expected 1 for the keys that come once, and a multiple of 2"),
        ([6], {"shared": ["genres", "recent"]}, "lengths: expected 2 for the keys that come once, and a multiple of 1"),
        ([6, 0, 0, 0], {"shared": ["user_id", "genres", "recent"]}, "lengths: expected 3 for the keys that come once"),
        ([6], {"shared": ["item"], "tables": ["item"], "features": None}, "expected the parameter once or tables, got both"),
        ([1, 1, 4], {"shared": ["genres"], "outputs": [EMBEDDINGS]}, "are answered in the output 'once': ask for it"),
        ([1, 1, 5, -1, 0], {"shared": ["genres"]}, "feature 'recent': expected lengths >= 0, got -1 for sample 0"),
        ([1, 1, 5, 1, 0], {"shared": ["genres"]}, "feature 'genres': expected its bags to take ids"),
        ([1, 1, 1, 1, 2], {"shared": ["user_id"]}, None),
    ],
)  # fmt: skip
def test_invalid_shared_features_are_refused(
    lengths: list[int], parameters: Any, why: str | None, mixed: Path
) -> None:
    engine = Engine.open(mixed)
    sizes = np.array(lengths, np.int32)
    request = replace(Tensors(["user_id", "genres", "recent"], INTS, sizes), **parameters)
    if why is None:
        assert {name: output.shape for name, output in engine.outputs(request).items()} == {
            EMBEDDINGS: (2, 8), SHARED: (1, 16), SEQUENCES: (3 * 32,)
        }  # fmt: skip
        return
    with pytest.raises(InvalidRequest, match=why.replace("(", "\\(")):
        engine.outputs(request)


def test_errors_name_the_sample_and_position_beside_shared_keys(mixed: Path, tmp_path: Path) -> None:
    engine = Engine.open(mixed)
    bags: dict[str, Bags] = {"user_id": [[1], [2], [3]], "genres": [[4, 5]], "recent": [[1], [2], [10**6]]}
    with pytest.raises(IdsOutside, match=r"feature 'recent': .* got 1000000 for sample 2 \(values\[7\]\)"):
        engine.lookup(bags, shared=["genres"])
    positions = Engine.open(export_model(positioned(), tmp_path / "r", "p", FP32))
    with pytest.raises(InvalidRequest, match=r"feature 'item_id': expected at most 4 ids .* got 5 for sample 1"):
        positions.lookup({"user_id": [[1]], "item_id": [[1], [1, 2, 3, 4, 5]]}, shared=["user_id"])


def test_limits_count_shared_features_once(mixed: Path) -> None:
    limits = ServingSettings(max_request_ids=8, max_request_samples=3, max_sequence_bytes=4 * 128)
    bags: dict[str, Bags] = {"recent": [[1, 2, 3, 4]], "user_id": [[1], [2], [3]]}
    fits, too_long, too_many = (
        request_of(features, ["recent"], False)
        for features in (bags, {**bags, "recent": [[1] * 5]}, {**bags, "user_id": [[1]] * 4})
    )
    outcomes = merged_answers(mixed, [fits, too_long, too_many], limits)
    assert outcomes[0][SEQUENCES].size == 4 * 32
    assert "bytes of sequences: expected at most 512 in a request, got 640" in str(outcomes[1])
    assert "samples: expected at most 3 in a request, got 4" in str(outcomes[2])


@pytest.mark.parametrize(
    ("shared", "features", "why"),
    [
        ("user_id", {"user_id": [[1]]}, r"shared: expected names of features, \[name, …\], got 'user_id'"),
        ([3], {"user_id": [[1]]}, r"shared: expected names of features, \[name, …\], got \[3\]"),
        (["user_id"], {"user_id": [[1], [2]], "genres": [[1]]}, "feature 'user_id': expected one bag, because it comes"),
        (["user_id"], {"user_id": [], "genres": [[1]]}, "feature 'user_id': expected one bag, because it comes once, got 0"),
        (["user_id"], {"user_id": [[1]], "genres": [[1]], "words": [[1], [2]]}, "feature 'words': expected as many samples"),
        (["nobody"], {"user_id": [[1]]}, "once: 'nobody': expected one of 'user_id'"),
    ],
)  # fmt: skip
def test_lookups_that_share_invalid_names_or_bags_are_refused(
    shared: Any, features: Any, why: str, mixed: Path
) -> None:
    engine = Engine.open(mixed)
    with pytest.raises(InvalidRequest, match=why):
        engine.lookup(features, shared=shared)


def kjt(strides: Sequence[int], **options: Any) -> KeyedJaggedTensor:
    """user_id and genres, one id in each bag."""
    bags = sum(strides)
    return KeyedJaggedTensor(
        ["user_id", "genres"],
        torch.arange(bags),
        lengths=torch.ones(bags, dtype=torch.int32),
        stride_per_key_per_rank=[[stride] for stride in strides],
        **options,
    )


@pytest.mark.parametrize(
    ("features", "shared", "why"),
    [
        (kjt([2, 2]), ["user_id"], "feature 'user_id': expected one bag, because it comes once, got 2"),
        (kjt([1, 3]), ["genres"], "feature 'genres': expected one bag, because it comes once, got 3"),
        (
            kjt([1, 3]),
            [],
            "feature 'genres': expected as many samples as 'user_id' has, 1, got 3: .* name it in `shared`",
        ),
        (
            kjt([2, 2], inverse_indices=(["user_id", "genres"], torch.tensor([[0, 1, 1], [0, 0, 1]]))),
            [],
            "without inverse indices: name keys in `shared`",
        ),
    ],
    ids=["too_many", "the_other", "not_named", "inverse"],
)
def test_a_kjt_with_different_batch_sizes_is_refused(features: Any, shared: Any, why: str, mixed: Path) -> None:
    """Else bags would be those of another key."""
    with pytest.raises(InvalidRequest, match=why):
        Engine.open(mixed).lookup(features, shared=shared)


def test_a_kjt_with_a_batch_size_for_each_key_is_answered(mixed: Path) -> None:
    engine = Engine.open(mixed)
    answer = engine.lookup(kjt([1, 3]), shared=["user_id"])
    expected = engine.lookup({"user_id": [[0]] * 3, "genres": [[1], [2], [3]]})
    np.testing.assert_array_equal(answer["user_id"], expected["user_id"][:1])
    np.testing.assert_array_equal(answer["genres"], expected["genres"])


SCORED = {"dcn": dlrm_dcn, "towers": two_tower, "centred": Centred}


@pytest.mark.parametrize("name", one_in(2, SCORED))
def test_scores_are_the_model_s_own_for_each_pair(name: str, tmp_path: Path) -> None:
    module = SCORED[name]().eval()
    engine = Engine.open(export_model(module, tmp_path / "r", "m", EXACT))
    for seed, samples in enumerate((1, 7, 30)):
        bags, dense, shared, expected = pairs(module, seed, samples)
        assert_scores(engine.score(bags, dense, shared=shared), expected)
    none = {key: column if key in shared else [] for key, column in bags.items()}
    empty = engine.score(
        none, {name: rows[:1] if name in shared else rows[:0] for name, rows in dense.items()}, shared=shared
    )
    assert {len(numbers) for numbers in empty.values()} == {0}


def test_dense_inputs_give_the_number_of_samples_if_all_ids_are_shared(tmp_path: Path) -> None:
    module = dlrm_dcn().eval()
    engine = Engine.open(export_model(module, tmp_path / "r", "m", EXACT))
    user, _ = random_request(module, np.random.default_rng(0), 1)
    _, dense = random_request(module, np.random.default_rng(1), 6)
    expected = own_scores(module, {key: column * 6 for key, column in user.items()}, dense)
    assert_scores(engine.score(user, dense, shared=[*user]), expected)
    with pytest.raises(
        InvalidRequest, match=r"dense input 'dense_features': expected float32 \[1, 13\], a row for all"
    ):
        engine.score(user, dense, shared=[*user, *dense])
    with pytest.raises(
        InvalidRequest, match="once: 'nobody': expected one of 'f0', 'f1', 'f2', 'f3', 'dense_features'"
    ):
        engine.score(user, dense, shared=["nobody"])
