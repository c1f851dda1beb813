"""The dense parts of real models: cut out and compiled, they answer as the model does."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from export import ExportConfig, export_model
from export.errors import CheckpointError, ModelError, ParityError
from serving.bundle.load import open_bundle
from serving.bundle.scores import SCORES, DenseDtype, DensePart
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.scored_models import (
    EXACT,
    MODELS,
    WIDTH,
    WIDTHS,
    Centred,
    Relative,
    Surges,
    by_position,
    dlrm,
    own_scores,
    random_request,
    trained,
    two_tower,
)


def part_of(bundle: Path) -> DensePart:
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    return part


@pytest.mark.parametrize("model", one_in(4, MODELS), ids=lambda item: item.__name__)
def test_a_bundle_scores_like_the_trained_model(tmp_path: Path, model: Callable[[], nn.Module]) -> None:
    """With FP32 tables to 1e-6 of their size; with INT8 tables as far as the manifest says, or little more.

    They keep samples apart, and that is seen.
    """
    module, random = trained(model()), np.random.default_rng(1)
    widths = WIDTHS if model is by_position else {}
    exact = Engine.open(export_model(module, tmp_path, "exact", replace(EXACT, dense_widths=widths)))
    part = exact.bundle.manifest.dense_part
    assert part is not None
    assert (part.mixes_samples, part.mixed_by) == (False, None)  # it is scored with samples of others
    bundle = export_model(module, tmp_path, "int8", ExportConfig(scores=True, dense_widths=widths))
    rounded = Engine.open(bundle)
    parity = {item.name: item.parity for item in part_of(bundle).outputs}
    for samples in (1, 2, 33):
        bags, dense = random_request(module, random, samples)
        bags = dict(reversed(bags.items()))
        expected, answer = own_scores(module, bags, dense), exact.score(bags, dense)
        assert list(answer) == list(expected)
        for name, numbers in expected.items():
            assert answer[name].shape == numbers.shape
            np.testing.assert_allclose(answer[name], numbers, rtol=0, atol=1e-6 * max(1, np.abs(numbers).max()))
            assert parity[name].trained is not None
            moved = np.abs(rounded.score(bags, dense)[name] - numbers).max()
            assert moved <= 4 * (parity[name].trained or 0) + 1e-6


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A trained model with two outputs, and its bundle."""
    module = trained(two_tower())
    return module, export_model(module, tmp_path_factory.mktemp("towers"), "m", EXACT)


def test_embeddings_are_the_same_with_and_without_scores(towers: tuple[nn.Module, Path], tmp_path: Path) -> None:
    module, bundle = towers
    bags, _ = random_request(module, np.random.default_rng(0), 5)
    with_scores = Engine.open(bundle).lookup(bags)
    without = Engine.open(export_model(module, tmp_path, "b", ExportConfig(dtype=EXACT.dtype))).lookup(bags)
    assert list(with_scores) == list(without)
    for name, rows in without.items():
        np.testing.assert_array_equal(with_scores[name], rows)


@pytest.mark.parametrize(
    ("model", "what"),
    one_in(
        2,
        [
            (Centred, "aten.mean.dim at scored_models.py, line [0-9]+: `return logits - logits.mean"),
            (Surges, "aten.sum.dim_IntList at scored_models.py, line [0-9]+: `return logits [+] torch.relu"),
            (Relative, "aten.max.default at scored_models.py, line [0-9]+: `relative = dense_features"),
        ],
    ),
)
def test_mixing_of_samples_is_detected_and_named(tmp_path: Path, model: Callable[[], nn.Module], what: str) -> None:
    """Also where no dense input in [0, 1) would show it. What they meet in is named."""
    torch.manual_seed(0)
    widths = {"dense_features": WIDTH} if model is not Centred else {}
    part = part_of(export_model(model(), tmp_path, "m", replace(EXACT, dense_widths=widths)))
    assert part.mixes_samples
    assert re.match(what, part.mixed_by or "")


@pytest.mark.parametrize("dtype", one_in(2, [DenseDtype.INT8, DenseDtype.BF16]))
def test_narrow_weights_answer_as_near_as_the_manifest_says(tmp_path: Path, dtype: DenseDtype) -> None:
    module = trained(dlrm())
    config = ExportConfig(scores=True, dense_dtype=dtype, dtype=EXACT.dtype)
    bundle = export_model(module, tmp_path, "m", config)
    (output,) = part_of(bundle).outputs
    assert part_of(bundle).dtype is dtype
    if dtype is DenseDtype.INT8:  # torch quantizes what their layers take by its range over all samples
        assert part_of(bundle).mixes_samples
        assert (part_of(bundle).mixed_by or "").startswith("INT8")
    assert 0 < output.parity.scripted < output.parity.scale
    bags, dense = random_request(module, np.random.default_rng(0), 64)
    answer = Engine.open(bundle).score(bags, dense)["scores"]
    moved = np.abs(answer - own_scores(module, bags, dense)["scores"])
    assert 0 < moved.max() <= 4 * output.parity.scripted


@pytest.mark.parametrize("saved", one_in(3, ["state dict", "safetensors", "dcp"]))
@pytest.mark.parametrize("on_meta", one_in(2, [True, False]))
def test_weights_come_from_the_checkpoint(tmp_path: Path, saved: str, on_meta: bool) -> None:
    module = trained(two_tower())
    state = {f"module.{key}": item for key, item in module.state_dict().items()}
    path = tmp_path / "saved"
    if saved == "state dict":
        torch.save({"model": state}, path)
    elif saved == "dcp":
        save_dcp(state, checkpoint_id=path, no_dist=True)
    else:
        path = path.with_suffix(".safetensors")
        save_file(state, path)
    with torch.device("meta" if on_meta else "cpu"):
        untrained = type(module)()
    bundle = export_model(untrained, tmp_path / "r", "m", EXACT, checkpoint=path)
    bags, dense = random_request(module, np.random.default_rng(0), 9)
    answer, expected = Engine.open(bundle).score(bags, dense), own_scores(module, bags, dense)
    for name, numbers in expected.items():
        np.testing.assert_allclose(answer[name], numbers, rtol=0, atol=1e-6)
    assert (moved := part_of(bundle).outputs[0].parity.trained) is not None
    assert moved < 1e-6


def test_a_weight_that_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    module = two_tower()
    torch.save({key: item for key, item in module.state_dict().items() if key != "item_tower.bias"}, tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"weights: expected the key 'item_tower.bias', which is missing"):
        export_model(module, tmp_path / "r", "m", EXACT, checkpoint=tmp_path / "s")
    assert not (tmp_path / "r").exists()


def test_hooks_are_traced_or_refused(tmp_path: Path) -> None:
    """Those of modules that are one step of the graph cannot be traced."""
    module = dlrm()
    module.over_arch.register_forward_hook(lambda _, __, answer: answer + 1)
    bags, dense = random_request(module, np.random.default_rng(0), 5)
    scores = Engine.open(export_model(module, tmp_path, "m", EXACT)).score(bags, dense)
    np.testing.assert_allclose(scores["scores"], own_scores(module, bags, dense)["scores"], rtol=0, atol=1e-5)
    layer = next(item for item in module.over_arch.modules() if isinstance(item, nn.Linear))
    layer.register_forward_hook(lambda _, __, answer: answer + 1)
    with pytest.raises((ParityError, ModelError), match=r"compiled"):
        export_model(module, tmp_path, "n", EXACT)


def test_the_scores_file_loads_without_torchrec(towers: tuple[nn.Module, Path]) -> None:
    """It loads without torchrec, and depends on nothing else."""
    _, bundle = towers
    code = (
        "import sys, torch; program = torch.jit.load(sys.argv[1]); "
        "print([tuple(each.shape) for each in program(torch.zeros(5, 88))], 'torchrec' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(bundle / SCORES)], capture_output=True, text=True
    )
    assert done.stdout == "[(5,), (5, 8)] False\n", done.stderr


def test_meta_tensors_missing_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    torch.save(dlrm().state_dict(), tmp_path / "saved")
    with torch.device("meta"):
        module = dlrm()
    with pytest.raises(
        CheckpointError, match="a buffer of the dense part, '_tensor_constant0', is on the meta device"
    ):
        export_model(module, tmp_path / "r", "m", EXACT, checkpoint=tmp_path / "saved")
