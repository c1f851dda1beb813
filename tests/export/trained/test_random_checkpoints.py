"""Random models in random checkpoints: what is served is what the model answers after load_state_dict(strict=True).

RANDOM_MODELS says how many more are tried by the long test.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from export import ExportConfig, WeightDtype, export_model
from export.commands.module import _tables_on_meta
from export.errors import CheckpointError
from serving.engine import Engine
from tests.support.models import random_bags
from tests.support.random_checkpoints import FORMS, Form, Model, model, one_process, save_without_twins, trained
from tests.support.sequence_models import kjt_of

EXACT = ExportConfig(scores=True, dtype={"*": WeightDtype.FP32})
DEFAULT, TRIED = 4, 72
# Of those up to TRIED, those that have between them every form and change, and most pairs of them.
CHOSEN = (
    4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17, 19, 20, 21, 22, 25, 26, 27, 28, 29, 30, 34, 44, 47, 48, 52, 53, 55, 56,
    57, 58, 59, 60, 62, 63, 64, 66, 67,
)  # fmt: skip
MORE = int(os.environ.get("RANDOM_MODELS", "0"))
# What changes: the saved state dict, in place, its keys beginning with a prefix. Whether it is still the model's.
Change = Callable[[dict[str, Any], str, np.random.Generator], bool]


def nothing(_state: dict[str, Any], _prefix: str, _random: np.random.Generator) -> bool:
    return True


def removed(state: dict[str, Any], prefix: str, random: np.random.Generator) -> bool:
    del state[own_key(state, prefix, random)]
    return False


def renamed(state: dict[str, Any], prefix: str, random: np.random.Generator) -> bool:
    key = own_key(state, prefix, random)
    path, _, leaf = key.rpartition(".")
    state[str(random.choice([f"{path}.old_{leaf}", f"other.{key}", f"{key}.weight"])).lstrip(".")] = state.pop(key)
    return False


def moved_to_an_average(state: dict[str, Any], prefix: str, random: np.random.Generator) -> bool:
    """A whole average beside the model, which lacks a key."""
    key = own_key(state, prefix, random)  # before the average has keys, which all begin with the prefix ""
    beside_an_average(state, prefix, random)
    del state[key]
    return False


def doubled_in_a_wrapper(state: dict[str, Any], prefix: str, random: np.random.Generator) -> bool:
    key = own_key(state, prefix, random)
    state[f"{prefix}module.{key.removeprefix(prefix)}"] = other(state[key])
    return False


def beside_an_average(state: dict[str, Any], prefix: str, _random: np.random.Generator) -> bool:
    state |= {
        f"ema.{key.removeprefix(prefix)}": other(value) for key, value in state.items() if key.startswith(prefix)
    }
    return False


def beside_other_modules(state: dict[str, Any], prefix: str, _random: np.random.Generator) -> bool:
    state |= {f"{prefix}loss.weight": torch.ones(3), f"{prefix}metrics.auc.total": torch.tensor(3)}
    return True


def longer(state: dict[str, Any], _prefix: str, _random: np.random.Generator) -> bool:
    """Integers and floats outside of tables in more bits."""
    kinds = {torch.int32: torch.int64, torch.float16: torch.float64, torch.uint8: torch.int16}
    for key, value in state.items():
        if "embedding_bags" not in key and (kind := kinds.get(value.dtype)) is not None:
            state[key] = value.to(kind)
    return True


def shaped(state: dict[str, Any], prefix: str, random: np.random.Generator) -> bool:
    key = own_key(state, prefix, random)
    state[key] = torch.cat([state[key].reshape(-1), state[key].reshape(-1)[:1]])
    return False


CHANGES: tuple[Change, ...] = (
    nothing, removed, renamed, moved_to_an_average, doubled_in_a_wrapper, beside_an_average, beside_other_modules, longer, shaped
)  # fmt: skip


def own_key(state: Mapping[str, Any], prefix: str, random: np.random.Generator) -> str:
    """A key of the model's that has no twin, and that torch does not fill in."""
    twins = ("out.weight", "other.weight", "one.weight", "ebc.embedding_bags.t0.weight")
    keys = [key for key in state if key.startswith(prefix) and key.removeprefix(prefix) not in twins]
    return str(random.choice(sorted(key for key in keys if not key.endswith("num_batches_tracked"))))


def other(numbers: Tensor) -> Tensor:
    """Numbers that would be another model's."""
    return ~numbers if numbers.dtype is torch.bool else numbers * 2 + 1


def answers(module: Model, bags: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return np.asarray(module(kjt_of(bags)))


def check(seed: int, folder: Path) -> str:
    """Export one model from its checkpoint; what was tried, for messages."""
    random = np.random.default_rng((seed, 3))
    name = [*FORMS][seed % len(FORMS)]
    form: Form = FORMS[name]
    change = CHANGES[random.integers(len(CHANGES))] if random.random() < 0.7 else nothing
    by_example, on_meta = bool(random.random() < 0.3), bool(random.random() < 0.5)
    what = f"seed {seed}: {name}, {change.__name__}, example {by_example}, meta {on_meta}"
    module = trained(seed)
    if name == "safetensors" and change is nothing:
        path, is_own = save_without_twins(module, folder), True
    else:
        state, prefix = form.wrap(module)
        is_own = change(state, prefix, random)
        path = form.write(state, folder)
        if is_own:  # the oracle is a module that loads what was saved
            module = model(seed)
            state_of_model = {key: value for key, value in state.items() if key.startswith(prefix)}
            bare = {_bare(key.removeprefix(prefix)): whole(value) for key, value in state_of_model.items()}
            expected_keys = module.state_dict().keys()
            module.load_state_dict({key: value for key, value in bare.items() if key in expected_keys}, strict=True)
    bags = random_bags(random, module.all_specs, 7)
    if on_meta:
        with _tables_on_meta():
            built = model(seed)
    else:
        built = model(seed)
    config = replace(EXACT, example=(kjt_of(random_bags(random, module.all_specs, 5)),) if by_example else None)
    try:
        bundle = export_model(built, folder / "r", "m", config, checkpoint=path)
    except CheckpointError as error:
        if is_own:
            raise AssertionError(what) from error
        return what
    assert is_own, f"{what}: served"
    with Engine.open(bundle) as engine:
        result = engine.score(bags)["scores"]
    expected = answers(module, bags)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=what)
    return what


def _bare(key: str) -> str:
    return key.replace("._orig_mod", "")


def whole(tensor: Any) -> Tensor:
    answer: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return answer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("seed", range(DEFAULT))
def test_a_random_checkpoint_is_served_as_loaded_or_refused(tmp_path: Path, seed: int) -> None:
    with one_process():
        check(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", [*CHOSEN, *range(TRIED, TRIED + MORE)])
def test_more_random_checkpoints(tmp_path: Path, seed: int) -> None:
    with one_process():
        check(seed, tmp_path)
