"""What is served of a checkpoint is what the model answers after load_state_dict(strict=True)."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from export import ExportConfig, WeightDtype, export_model
from export.commands.module import _tables_on_meta
from export.errors import CheckpointError, ModelError, QuantizeError
from export.parity.verify import ComparedModel, verify
from export.publish.changes import publish_changes
from export.trained.model_weights import load_weights, open_weights
from export.trained.tables import collect_tables
from serving.bundle.load import open_bundle
from serving.bundle.scores import DenseDtype
from serving.engine import Engine
from serving.errors import ConfigurationError
from tests.support.models import Spec, collection

EXACT = ExportConfig(scores=True, dtype={"*": WeightDtype.FP32})
IDS = [[3], [1, 4], []]


def bags() -> EmbeddingBagCollection:
    return collection((Spec("item", 20, 8, "SUM", ("i",)),))


def kjt() -> KeyedJaggedTensor:
    lengths = torch.tensor([*map(len, IDS)])
    return KeyedJaggedTensor(["i"], torch.tensor([id_ for bag in IDS for id_ in bag]), lengths=lengths)


class Buffers(nn.Module):
    """It uses a buffer of each kind."""

    columns: Tensor
    halves: Tensor
    kept: Tensor
    bytes: Tensor
    factor: Tensor

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.ebc = bags()
        of: Mapping[str, Tensor] = {
            "columns": torch.arange(8).roll(scale),
            "halves": torch.arange(8, dtype=torch.int32) % (scale + 1),
            "kept": torch.arange(8) % (scale + 1) == 0,
            "bytes": torch.arange(8, dtype=torch.uint8) * scale,
            "factor": torch.tensor(0.5 * scale),
            "precise": torch.linspace(0, 1 / (2 + scale), 8, dtype=torch.float64),
            "mask": torch.zeros(8).masked_fill(torch.arange(8) % (scale + 2) == 1, -torch.inf),
        }
        for name, value in of.items():
            self.register_buffer(name, value)
        self.register_buffer("constant", torch.ones(8), persistent=False)
        self.phases = nn.Parameter(torch.polar(torch.ones(8), torch.arange(8.0) * scale))

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        pooled: Any = self.ebc(ids).values().index_select(1, self.columns)
        pooled = torch.where(self.kept, pooled, pooled * self.factor) + self.halves + self.bytes.float() / 9
        turned = (pooled * self.phases).real
        return {
            "sums": pooled * self.constant,
            "shares": (pooled + self.mask).softmax(1),
            "precise": pooled.double() @ self.precise,
            "turned": turned,
        }


class ReadsItsTable(nn.Module):
    def __init__(self, _: int = 1) -> None:
        super().__init__()
        self.ebc, self.over = bags(), nn.Linear(8, 8)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.ebc(ids).values()) @ self.ebc.embedding_bags["item"].weight.t()
        return logits


class TiesItsTable(nn.Module):
    def __init__(self, _: int = 1) -> None:
        super().__init__()
        self.ebc, self.out = bags(), nn.Linear(8, 20, bias=False)
        self.out.weight = self.ebc.embedding_bags["item"].weight

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.out(self.ebc(ids).values())
        return logits


class TiesItsLayers(nn.Module):
    def __init__(self, _: int = 1) -> None:
        super().__init__()
        self.ebc, self.one, self.other = bags(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        states: Tensor = self.other(self.one(self.ebc(ids).values()).relu())
        return states


class Decides(nn.Module):
    """By a buffer, as it is followed."""

    times: Tensor

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.ebc = bags()
        self.register_buffer("times", torch.tensor(scale))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.ebc(ids).values()
        for _ in range(int(self.times)):
            pooled = pooled.tanh() + 0.1
        return pooled


def trained(kind: Callable[[int], nn.Module]) -> nn.Module:
    module = kind(3).eval()
    torch.manual_seed(5)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter))
    return module


def answers(module: nn.Module) -> dict[str, Any]:
    with torch.no_grad():
        result = module(kjt())
    return {
        name: value.numpy() for name, value in (result if isinstance(result, dict) else {"scores": result}).items()
    }


def served(bundle: Path) -> dict[str, Any]:
    with Engine.open(bundle) as engine:
        return dict(engine.score({"i": IDS}))


def assert_same(answer: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, numbers in expected.items():
        np.testing.assert_allclose(answer[name], numbers, rtol=0, atol=2e-6, err_msg=name)


def untrained(kind: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(6)
    with _tables_on_meta():
        return kind(1).eval()


def export(module: nn.Module, tmp_path: Path, state: Any, config: ExportConfig = EXACT) -> Path:
    """Export a module with the weights of a state dict."""
    torch.save(state, tmp_path / "w.pt")
    return export_model(module, tmp_path / "r", "m", config, checkpoint=tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("kind", "by_example"),
    [
        (Decides, False),
        *((kind, by) for kind in (Buffers, ReadsItsTable, TiesItsTable, TiesItsLayers) for by in (0, 1)),
    ],
)
def test_every_weight_and_buffer_is_read_in_its_own_dtype(tmp_path: Path, kind: Any, by_example: bool) -> None:
    module = trained(kind)
    config = replace(EXACT, example=(kjt(),) if by_example else None)
    bundle = export(untrained(kind), tmp_path, module.state_dict(), config)
    assert_same(served(bundle), answers(module))
    tables = collect_tables(untrained(kind), trace=not by_example)
    verification = verify(bundle, ComparedModel(tables, tmp_path / "w.pt", example=config.example))
    assert (verification.failures, verification.source) == ((), "weights from w.pt; 0 keys unused")


@pytest.mark.parametrize("kind", [TiesItsTable, TiesItsLayers])
def test_a_tied_weight_left_out_by_safetensors_is_found(tmp_path: Path, kind: Any) -> None:
    module = trained(kind)
    save_model(module, str(tmp_path / "w.safetensors"))
    bundle = export_model(untrained(kind), tmp_path / "r", "m", EXACT, checkpoint=tmp_path / "w.safetensors")
    assert_same(served(bundle), answers(module))


@pytest.mark.parametrize("kind", [TiesItsTable, TiesItsLayers])
def test_tied_weights_with_different_numbers_are_refused(tmp_path: Path, kind: Any) -> None:
    state = {name: tensor.clone() for name, tensor in trained(kind).state_dict().items()}
    bundle = export(untrained(kind), tmp_path, state)
    assert_same(served(bundle), answers(trained(kind)))
    state["out.weight" if kind is TiesItsTable else "other.weight"][3] += 1
    with pytest.raises(CheckpointError, match="are one tensor of the model, and have different numbers"):
        export(untrained(kind), tmp_path, state)


@pytest.mark.parametrize(
    ("key", "number", "said"),
    [
        ("columns", torch.arange(8.0), "weights 'columns': expected torch.int64, got torch.float32"),
        ("halves", torch.full((8,), 2**40), "weights 'halves': has integers outside torch.int32"),
        ("phases", torch.ones(8), "weights 'phases': expected torch.complex64, got torch.float32"),
        ("kept", torch.ones(8, dtype=torch.uint8), "weights 'kept': expected torch.bool, got torch.uint8"),
        ("mask", torch.ones(9), r"weights 'mask': expected shape \[8\], got \[9\]"),
        ("mask", torch.tensor(1.0), r"weights 'mask': expected shape \[8\], got one number"),
        ("factor", torch.ones(2), r"weights 'factor': expected shape \[\], got \[2\]"),
    ],
)
def test_numbers_that_the_model_cannot_have_are_refused(tmp_path: Path, key: str, number: Tensor, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        export(untrained(Buffers), tmp_path, trained(Buffers).state_dict() | {key: number})


def test_weights_are_converted_to_the_models_dtypes(tmp_path: Path) -> None:
    state = trained(Buffers).state_dict()
    state |= {
        "halves": state["halves"].long(),
        "precise": state["precise"].half(),
        "factor": state["factor"].double(),
    }
    module = trained(Buffers)
    module.load_state_dict(state)
    assert_same(served(export(untrained(Buffers), tmp_path, state)), answers(module))


def test_half_precision_table_has_rounded_numbers(tmp_path: Path) -> None:
    state = trained(TiesItsLayers).state_dict()
    config = ExportConfig(dtype={"*": WeightDtype.FP32})
    with Engine.open(export(bags().half(), tmp_path, state, config)) as engine:
        row = engine.lookup({"i": [[3]]})["i"][0]
    np.testing.assert_array_equal(row, state["ebc.embedding_bags.item.weight"][3].half().float())


def test_a_mask_of_infinity_is_served(tmp_path: Path) -> None:
    state = trained(ReadsItsTable).state_dict()
    state["over.weight"][2, 3] = -torch.inf
    with pytest.raises(QuantizeError, match=r"weights 'over\.weight': hold NaN or infinity"):
        export(untrained(ReadsItsTable), tmp_path, state, replace(EXACT, dense_dtype=DenseDtype.INT8))


class Converts(TiesItsLayers):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.one.weight.data.mul_(2)


class HasMore(TiesItsLayers):
    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: Any) -> None:
        self.one.weight.data.mul_(state)


@pytest.mark.parametrize("kind", [Converts, HasMore])
def test_a_model_with_loading_code_of_its_own_is_refused(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ModelError, match=f"{kind.__name__}: has code of its own that load_state_dict calls"):
        export(kind().eval(), tmp_path, kind().state_dict())


def test_the_prefix_option_holds_wherever_a_checkpoint_is_read(tmp_path: Path) -> None:
    module, average = trained(TiesItsLayers), untrained(TiesItsLayers)
    average = type(average)().eval()
    state = {
        "model": module.state_dict(),
        "ema": {f"module.{key}": tensor for key, tensor in average.state_dict().items()},
    }
    with pytest.raises(
        CheckpointError, match=r"w\.pt: has all weights of the model 2 times, under 'model\.', 'ema\.module\."
    ):
        export(untrained(TiesItsLayers), tmp_path, state)
    for prefix, expected, prefix_used in (("model", module, "model."), ("ema.", average, "ema.")):
        config = replace(EXACT, checkpoint_prefix=prefix)
        bundle = export(untrained(TiesItsLayers), tmp_path, state, config)
        assert_same(served(bundle), answers(expected))
        notes = open_bundle(bundle).manifest.notes
        assert notes == (f"weights from `{prefix_used}` of w.pt; 5 keys unused",)
    checkpoint = tmp_path / "w.pt"
    new = untrained(TiesItsLayers)
    with pytest.raises(CheckpointError, match="2 times"):
        verify(bundle, ComparedModel(collect_tables(new), checkpoint))
    assert not verify(bundle, ComparedModel(collect_tables(new), checkpoint, "ema")).failures
    assert verify(bundle, ComparedModel(collect_tables(new), checkpoint, "model.")).failures
    with pytest.raises(CheckpointError, match="2 times"):
        publish_changes(tmp_path / "r", "m", new, checkpoint=checkpoint)
    assert publish_changes(tmp_path / "r", "m", new, checkpoint=checkpoint, checkpoint_prefix="ema") is None
    changed = publish_changes(tmp_path / "r", "m", new, checkpoint=checkpoint, checkpoint_prefix="model")
    assert changed is not None
    assert changed.rows == 20
    with pytest.raises(
        ConfigurationError, match=r"checkpoint_prefix .* expected a checkpoint .--checkpoint. as well"
    ):
        export_model(module, tmp_path / "r", "m", replace(EXACT, checkpoint_prefix="model"))


class Normalizes(nn.Module):
    """It has a module twice, one in a wrapper's name, and one that tracks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.first, self.module = (
            bags(),
            nn.BatchNorm1d(8),
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        )
        self.again, self.plain = self.first, nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        rows: Tensor = self.plain(self.again(self.module(self.first(self.ebc(ids).values()))))
        return rows


def as_saved(metadata: str, lacking: str) -> dict[str, Any]:
    """A state dict without the keys that end in `lacking`, and with its modules' versions or without."""
    torch.manual_seed(5)
    module = Normalizes().train()
    module(kjt())
    state: Any = module.state_dict()
    versions = state._metadata
    for key in [key for key in state if key.endswith(lacking)]:
        del state[key]
    if metadata == "none":
        return dict(state)
    state._metadata = {
        "all": versions,
        "old": OrderedDict({path: {"version": 1} for path in versions}),
        "some": OrderedDict({path: of for path, of in versions.items() if path != "first"}),
        "unnumbered": OrderedDict({path: {} for path in versions}),
    }[metadata]
    return state  # type: ignore[no-any-return]


@pytest.mark.parametrize("lacking", ["num_batches_tracked", "1.num_batches_tracked", "running_mean", "*"])
@pytest.mark.parametrize("metadata", ["none", "all", "old", "some", "unnumbered", "safetensors", "nested", "wrapped"])
def test_counters_of_batches_are_filled_in_as_torch_does_it(tmp_path: Path, metadata: str, lacking: str) -> None:
    path = tmp_path / ("w.safetensors" if metadata == "safetensors" else "w.pt")
    state = as_saved(metadata if metadata in ("none", "all", "old", "some", "unnumbered") else "none", lacking)
    model = Normalizes()
    if metadata == "safetensors":
        save_file({key: value.clone() for key, value in state.items()}, path)
    elif metadata == "wrapped":
        torch.save({f"module.{key}": value for key, value in state.items()}, path)
    else:
        torch.save({"epoch": 3, "state_dict": state} if metadata == "nested" else state, path)
    oracle = Normalizes()
    try:
        oracle.load_state_dict(state, strict=True)
    except RuntimeError:
        with pytest.raises(CheckpointError, match="expected the key"):
            open_weights(model, collect_tables(model), path, is_whole=True)
        return
    trained = collect_tables(model)
    load_weights(trained, open_weights(model, trained, path, is_whole=True))
    for key, expected in oracle.state_dict().items():
        if not key.startswith("ebc"):
            torch.testing.assert_close(trained.module.state_dict()[key], expected, rtol=0, atol=0)
