"""Which keys of a checkpoint are taken for a model's: those under one prefix, or none."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from export.errors import CheckpointError
from export.trained.checkpoint_prefix import WRAPPERS, ModelKeys, Saved, match_keys

TABLE, HEAD = "ebc.embedding_bags.t.weight", ("tower.head.weight", "tower.head.bias", "head.weight")
KEYS = (TABLE, *HEAD)
MODEL = ModelKeys({TABLE: "table 't'"} | dict.fromkeys(HEAD, "weights"), KEYS, is_whole=True)


def under(*prefixes: str, keys: Iterable[str] = KEYS) -> list[str]:
    return [prefix + key for prefix in prefixes for key in keys]


@pytest.mark.parametrize(
    ("saved", "prefix", "unused"),
    [
        (KEYS, "", 0),
        (under("module."), "module.", 0),
        (under("state_dict.model._orig_mod."), "state_dict.model._orig_mod.", 0),
        ([*under("module."), "n_averaged"], "module.", 1),
        ([*KEYS, "loss.weight", "loss.bias"], "", 2),
        ([*under("model."), "optimizer.state.0.exp_avg", "ema.decay"], "model.", 2),
        ([*under("model."), *under("ema.", keys=HEAD)], "model.", 3),
        ([*KEYS, *under("teacher.", keys=HEAD)], "", 3),
        (["ebc.module.embedding_bags.t.weight", "tower._orig_mod.head.weight", "tower._orig_mod.head.bias", "head.weight"], "", 0),
        (["_fsdp_wrapped_module.tower._fsdp_wrapped_module.head._fsdp_wrapped_module." + value for value in ("weight", "bias")]
         + ["_fsdp_wrapped_module." + value for value in (TABLE, "head._checkpoint_wrapped_module.weight")], "_fsdp_wrapped_module.", 0),
    ],
)  # fmt: skip
def test_one_prefix_that_fits_is_taken(saved: list[str], prefix: str, unused: int) -> None:
    match = match_keys(Saved("c", saved), MODEL)
    assert (match.prefix, match.unused) == (prefix, unused)
    assert {*match.keys} == {*KEYS}
    for key, saved_key in match.keys.items():
        bare = [name for name in saved_key.removeprefix(prefix).split(".") if name not in WRAPPERS]
        assert ".".join(bare) == key


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        pytest.param([], "table 't': expected the key 'ebc.embedding_bags.t.weight', which is missing, as are", id="nothing"),
        pytest.param([TABLE, *HEAD[:2]], "weights: expected the key 'head.weight', which is missing", id="taken from a tower before"),
        pytest.param([*KEYS[:3], "head.weights"], "'head.weight', which is missing; the model does not have 'head.weights'", id="renamed"),
        pytest.param(under("model.", "ema."), "has all weights of the model 2 times, under 'ema.', 'model.'", id="model and EMA"),
        pytest.param([*KEYS, *under("ema.")], "2 times, under '', 'ema.'", id="EMA within"),
        pytest.param([*under("model.", keys=HEAD), *under("ema.")], "under 'ema.' alone, and some under others: 'model.' lacks table 't'", id="table in the EMA alone"),
        pytest.param([*under("", keys=KEYS[:3]), *under("ema.")], "some under others: '' lacks weights (head.weight)", id="weight in the EMA alone"),
        pytest.param([*under("", keys=KEYS[:3]), *under("model.")], "some under others: '' lacks weights (head.weight)", id="around the model"),
        pytest.param([*under("", keys=KEYS[:3]), "module.head.weight"], "'head.weight', which is missing", id="half in a wrapper"),
        pytest.param([*KEYS, "module.head.weight"], "unexpected keys under '': 'module.head.weight'", id="twice"),
        pytest.param([*KEYS, "tower.module.head.bias"], "unexpected keys under '': 'tower.module.head.bias'", id="twice in a tower"),
        pytest.param([*KEYS, "head.bias"], "unexpected keys under '': 'head.bias'", id="a bias that the model lacks"),
        pytest.param([*KEYS, "temperature"], "unexpected keys under '': 'temperature'", id="a parameter that the model lacks"),
        pytest.param([*KEYS, "tower.head.2.weight"], "unexpected keys under '': 'tower.head.2.weight'", id="a deeper tower"),
    ],
)  # fmt: skip
def test_missing_ambiguous_or_unexpected_keys_are_refused_by_name(saved: list[str], said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        match_keys(Saved("c", saved), MODEL)
    assert said in str(refused.value)


@pytest.mark.parametrize("saved", [under("model.", "ema."), [*under("model.", keys=HEAD), *under("ema.")]])
@pytest.mark.parametrize("prefix", ["ema.", "ema"])
def test_a_prefix_that_is_named_is_taken(saved: list[str], prefix: str) -> None:
    match = match_keys(Saved("c", saved), MODEL, prefix)
    assert match.prefix == "ema."
    assert match.keys == {key: f"ema.{key}" for key in KEYS}
    assert match.unused == len(saved) - len(KEYS)


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("model.", "expected the key 'model.head.weight', which is missing; all are under 'ema.'"),
        ("", "expected the key 'ebc.embedding_bags.t.weight', which is missing"),
        ("other.", "--checkpoint-prefix): expected the beginning of its keys, as 'model.', 'ema.', got 'other.'"),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(prefix: str, said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        match_keys(Saved("c", [*under("model.", keys=KEYS[:3]), *under("ema.")]), MODEL, prefix)
    assert said in str(refused.value)


def test_tables_are_found_beside_any_other_keys() -> None:
    tables = ModelKeys({"embedding_bags.t.weight": "table 't'"}, ["embedding_bags.t.weight"])
    match = match_keys(Saved("c", [*KEYS, "ebc.embedding_bags.other.weight"]), tables)
    assert (match.prefix, match.unused) == ("ebc.", 4)
    with pytest.raises(CheckpointError, match=r"2 times, under 'item\.ebc\.', 'user\.ebc\.'"):
        match_keys(Saved("c", under("user.", "item.")), tables)


def test_keys_of_a_model_named_like_a_wrapper_are_matched() -> None:
    weights: Any = {"module.weight": "weights", "head.weight": "weights"}
    assert match_keys(Saved("c", [*weights]), ModelKeys(weights, weights)).prefix == ""
    assert match_keys(Saved("c", under("module.", keys=weights)), ModelKeys(weights, weights)).prefix == "module."
    compiled = {f"_orig_mod.{key}": "weights" for key in KEYS}
    assert match_keys(Saved("c", under("model.")), ModelKeys(compiled, compiled)).keys == {
        f"_orig_mod.{key}": f"model.{key}" for key in KEYS
    }


def test_one_of_several_tied_weights_is_enough() -> None:
    tied = replace(MODEL, twins=dict.fromkeys((TABLE, "head.weight"), (TABLE, "head.weight")))
    match = match_keys(Saved("c", [key for key in KEYS if key != "head.weight"]), tied)
    assert "head.weight" not in match.keys
    assert tied.saved_as("head.weight", match.keys) == TABLE
