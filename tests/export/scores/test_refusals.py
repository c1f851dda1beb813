"""Models whose scores cannot be served right: refused by name, with the line of the model's code that is to blame."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import remove_parametrizations
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRMTrain

from export import ExportConfig, export_model
from export.errors import ExportError, ModelError
from serving.bundle.load import open_bundle
from serving.bundle.scores import DenseDtype
from serving.errors import ConfigurationError
from tests.support.models import collection
from tests.support.module_calls import assert_served
from tests.support.scored_models import EVEN, EXACT, dlrm, even


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = even()
        self.over = nn.Linear(64, 1)

    def logits(self, ids: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.bags(ids).values())
        return logits


class Branches(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits = self.logits(ids)
        if logits.sum() > 0:  # to blame
            return logits
        return -logits


class CountsIds(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits = self.logits(ids)
        return logits.add(ids.lengths().sum())  # to blame


class ReadsNumbers(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits = self.logits(ids)
        return logits.mul(float(logits.max()))  # to blame


class HasDefault(_Model):
    def forward(self, ids: KeyedJaggedTensor, price: Tensor | None = None) -> Tensor:
        return self.logits(ids).add(price)  # type: ignore[arg-type]


class TakesMany(_Model):
    def forward(self, ids: KeyedJaggedTensor, *more: Tensor) -> Tensor:
        return self.logits(ids) + more[0]


class TakesValues(_Model):
    def forward(self, ids: KeyedJaggedTensor, values: Tensor) -> Tensor:
        return self.over(values).add(self.logits(ids))  # type: ignore[no-any-return]


class AnswersNothing(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Any:
        self.logits(ids)
        return "none"


class AnswersTables(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Any:
        return self.bags(ids)


class AnswersOnce(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.logits(ids).sum()


class FixedSize(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.logits(ids) + torch.zeros(64, 1)


class Joins(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(64 + 13, 1)

    def forward(self, ids: KeyedJaggedTensor, price: Tensor) -> Tensor:
        logits: Tensor = self.over(torch.cat([self.bags(ids).values(), price], 1))
        return logits


class NotInTorchScript(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits = self.logits(ids)
        return logits.sum(axis=1, keepdims=True)  # type: ignore[call-overload,no-any-return]  # to blame


class InBfloat16(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.logits(ids).bfloat16()  # to blame


class InBool(_Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.logits(ids).bool()  # to blame


class ReadsNormedWeight(_Model):
    """A weight of a layer whose forward it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.over = weight_norm(self.over)

    def logits(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.bags(ids).values() @ self.over.weight.t()  # type: ignore[no-any-return]  # to blame

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.logits(ids)


class Normed(_Model):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.last = nn.Sequential(norm(nn.Linear(1, 1)))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        scores: Tensor = self.last(self.logits(ids))  # to blame
        return scores


class OutOfReach(_Model):
    def forward(self, ids: KeyedJaggedTensor, price: Tensor) -> Tensor:
        return self.logits(ids) + price.log()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Branches, "Branches: its forward cannot be traced{line}: symbolically traced variables"),
        (CountsIds, "CountsIds: uses 'ids' beside its collections, too{line}"),
        (ReadsNumbers, "ReadsNumbers: its forward cannot be traced{line}"),
        (HasDefault, "HasDefault: argument 'price' has a default"),
        (TakesMany, "TakesMany: argument '*more' has a default, or stands for several"),
        (TakesValues, "TakesValues: dense input 'values': expected a name of its own"),
        (
            AnswersNothing,
            "AnswersNothing: expected a tensor, or tensors as a tuple or by name, as its answer, got str",
        ),
        (
            AnswersTables,
            "AnswersTables: expected a tensor, or tensors as a tuple or by name, as its answer, got KeyedTensor",
        ),
        (AnswersOnce, "AnswersOnce: output 'scores': expected shape [64, …] for 64 samples, got []"),
        (FixedSize, "FixedSize: output 'scores': expected shape [1, …] for 1 samples, got [64, 1]"),
        (
            Joins,
            "give it: dense_widths = { price = N } in --config, --dense-width price=N of tbe-export model, or in Python "
            "dense_widths={'price': N}: N is 77, the width of the nn.Linear, minus the widths of what else torch.cat joins",
        ),
        (
            NotInTorchScript,
            "NotInTorchScript: its forward cannot be compiled: Arguments for call are not valid: `sum_1 = {line}",
        ),
        (
            InBfloat16,
            "InBfloat16: its forward calls .bfloat16(){line}: expected a method that TorchScript has: write "
            ".to(torch.bfloat16), or give an example",
        ),
        (
            InBool,
            "InBool: its forward calls .bool(){line}: expected a method that TorchScript has: write .to(torch.bool)",
        ),
        (
            ReadsNormedWeight,
            "ReadsNormedWeight: its forward uses over (ParametrizedLinear){line}, whose weight is computed in each call: "
            "expected a plain weight, which TorchScript can compile: call "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') before the export, or give an example",
        ),
        (lambda: Normed(weight_norm), "Normed: its forward uses last.0 (ParametrizedLinear){line}, whose weight"),
        (lambda: Normed(spectral_norm), "Normed: its forward uses last.0 (ParametrizedLinear){line}, whose weight"),
        (OutOfReach, "dense input 'price': its width cannot be read off an nn.Linear that takes it"),
        (lambda: DLRMTrain(dlrm()), "DLRMTrain: uses 'batch' beside its collections, too"),
        (even, "expected one module around all collections, with scores, found EmbeddingBagCollection"),
        (lambda: nn.ModuleDict({"a": dlrm()}), None),
        (lambda: nn.ModuleDict({"a": Branches(), "b": nn.Sequential(even())}), "ModuleDict: "),
    ],
)
def test_unsupported_models_are_refused_by_name_and_line(
    tmp_path: Path, model: Callable[[], nn.Module], why: str | None
) -> None:
    module = model()
    if why is None:
        assert export_model(module, tmp_path / "r", "m", EXACT).exists()
        return
    with pytest.raises((ExportError, ConfigurationError)) as refused:
        export_model(module, tmp_path / "r", "m", EXACT)
    message = str(refused.value)
    assert why.split("{line}")[0] in message
    if "{line}" in why:
        lines, first = inspect.getsourcelines(type(module))
        (blamed,) = (number for number, line in enumerate(lines) if "# to blame" in line)
        assert f" at {Path(__file__)}, line {first + blamed}: `{lines[blamed].strip()}`" in message
    assert "--scores" in message or "--example" in message or "rename it" in message or "--dense-width" in message
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_parametrized_layers_are_served_as_the_message_advises(norm: Any, tmp_path: Path) -> None:
    def plain(layer: nn.Module) -> nn.Module:
        return remove_parametrizations(norm(layer), "weight")

    ids = KeyedJaggedTensor(["f0", "f1", "f2", "f3"], torch.arange(8), lengths=torch.ones(8, dtype=torch.int32))
    without, traced = Normed(plain).eval(), Normed(norm).eval()
    assert_served(export_model(without, tmp_path, "plain", EXACT), without, (ids,))
    assert_served(export_model(traced, tmp_path, "traced", EXACT, example=(ids,)), traced, (ids,))


def test_a_parametrization_outside_the_forward_is_accepted(tmp_path: Path) -> None:
    model = Normed(lambda layer: layer)
    model.unused = weight_norm(nn.Linear(2, 2))
    assert export_model(model, tmp_path, "m", EXACT).exists()


def test_arguments_that_are_not_used_keep_their_defaults(tmp_path: Path) -> None:
    class Unused(_Model):
        def forward(self, ids: KeyedJaggedTensor, labels: Tensor | None = None) -> Tensor:  # noqa: ARG002
            return self.logits(ids)

    export_model(Unused(), tmp_path, "m", EXACT)


def test_names_of_a_named_tuple_are_those_of_the_scores(tmp_path: Path) -> None:
    class Named(NamedTuple):
        click: Tensor
        buy: Tensor

    class Names(_Model):
        def forward(self, ids: KeyedJaggedTensor) -> Named:
            return Named(self.logits(ids), self.logits(ids) * 2)

    bundle = export_model(Names(), tmp_path, "m", EXACT)
    assert [output.name for output in open_bundle(bundle).manifest.dense_part.outputs] == ["click", "buy"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dense_dtype": DenseDtype.BF16}, "dense_dtype (--dense-dtype): expected --scores beside it"),
        ({"dense_widths": {"a": 3}}, "dense_widths (--dense-width): expected --scores beside it"),
        ({"scores": True, "dense_widths": {"a": 0}}, "dense_widths (--dense-width) 'a': expected > 0, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        ExportConfig(**settings)


def test_widths_of_other_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'prices': expected one of 'dense_features'"):
        export_model(dlrm(), tmp_path, "m", replace(EXACT, dense_widths={"prices": 13}))


class Siamese(nn.Module):
    """The same key from two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(EVEN)

    def forward(self, positive: KeyedJaggedTensor, negative: KeyedJaggedTensor) -> Tensor:
        margin: Tensor = self.bags(positive)["f0"] - self.bags(negative)["f1"]
        return margin


class TwoSides(Siamese):
    """Two collections, one key."""

    def __init__(self) -> None:
        super().__init__()
        self.other = collection(EVEN[:1])

    def forward(self, positive: KeyedJaggedTensor, negative: KeyedJaggedTensor) -> Tensor:
        product: Tensor = self.bags(positive)["f1"] * self.other(negative)["f0"]
        return product


class NamedAsKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.over = collection(EVEN), nn.Linear(3, 16)

    def forward(self, ids: KeyedJaggedTensor, f1: Tensor) -> Tensor:
        product: Tensor = self.bags(ids)["f0"] * self.over(f1)
        return product


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Siamese, "Siamese: looks key 'f0' up from the arguments 'positive' and 'negative', a request has it once at "),
        (TwoSides, "TwoSides: looks key 'f0' up from the arguments 'positive' and 'negative', a request has it once at "),
        (NamedAsKey, "NamedAsKey: dense input 'f1': expected a name that no key has: rename it in the forward"),
    ],
)  # fmt: skip
def test_models_whose_requests_would_be_ambiguous_are_refused(
    model: type[nn.Module], why: str, tmp_path: Path
) -> None:
    """Their scores would be those of one bag, whatever the caller meant."""
    with pytest.raises(ModelError, match=why):
        export_model(model(), tmp_path, "m", EXACT)


class UnderAutocast(_Model):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.logits(ids).float() + kind


class Scripted(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.jit.script(nn.Linear(1, 1))

    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        scores: Tensor = self.last(self.logits(ids)) + kind
        return scores


class TakesNumbers(_Model):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.logits(ids) + kind.float()


class TakesComplex(_Model):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.logits(ids) + kind.real


@pytest.mark.parametrize(
    ("model", "kind", "why"),
    [
        (UnderAutocast, torch.rand(6, 1), "UnderAutocast: its forward enters autocast: expected `.to"),
        (Scripted, torch.rand(6, 1), "Scripted: last is TorchScript, which torch.export does not follow: expected"),
        (
            TakesComplex,
            torch.rand(6, 1).to(torch.complex64),
            "kind: expected real numbers, which requests bring, got",
        ),
        (
            TakesNumbers,
            torch.ones(6, 1).to(torch.uint16),
            "kind: expected one of float32, .* bool, got torch.uint16: give",
        ),
        (
            TakesNumbers,
            torch.ones(6, 1).to(torch.float8_e4m3fn),
            "kind: expected one of float32, .*, got torch.float8_e4m3fn",
        ),
    ],
)
def test_models_and_inputs_unsupported_with_an_example_are_refused(
    model: type[nn.Module], kind: Tensor, why: str, tmp_path: Path
) -> None:
    keyed = KeyedJaggedTensor(
        [f"f{number}" for number in range(4)], torch.arange(24) % 20, lengths=torch.ones(24, dtype=torch.int32)
    )
    with pytest.raises(ModelError, match=why):
        export_model(model().eval(), tmp_path, "m", EXACT, example=(keyed, kind))


def test_an_example_with_different_samples_for_each_key_is_refused(tmp_path: Path) -> None:
    keyed = KeyedJaggedTensor(
        ["f0", "f1", "f2", "f3"],
        torch.arange(8),
        lengths=torch.ones(8, dtype=torch.int32),
        stride_per_key_per_rank=[[2], [2], [2], [2]],
        inverse_indices=(["f0", "f1", "f2", "f3"], torch.zeros(4, 6, dtype=torch.int64)),
    )
    with pytest.raises(ModelError, match="ids: expected one number of samples for all keys, as in requests"):
        export_model(TakesComplex().eval(), tmp_path, "m", EXACT, example=(keyed, torch.rand(6, 1)))
