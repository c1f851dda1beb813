"""Each named model answers by itself, and is served as it answers or refused by name."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor

from export import WeightDtype, export_model
from export.errors import ModelError
from serving.bundle.scores import DenseFormat
from serving.engine import Engine
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from tests.models.keys import ORDER
from tests.models.registry import MODELS, REFUSED, SERVED, call, example_of, module_of
from tests.support.bundle_reader import exported_table
from tests.support.long_cases import one_in
from tests.support.module_calls import Numbers, answer_of_call, assert_close, column_of, request_of_call
from tests.support.no_torchscript import NoTorchScript, remove_torchscript
from tests.support.on_gpu import GPU, sent, to_gpu
from tests.support.scored_models import EXACT

# `.squeeze()` of an answer of one sample leaves out the dimension of samples. What is served keeps it.
SQUEEZED = ("squeezed_answer", "values_and_lengths")
# Outputs that the module answers with the samples in dimension 1: what is served has them first.
MOVED = {("rows_side_by_side", "scores_0")}


@pytest.mark.parametrize("name", MODELS)
def test_each_model_answers_by_itself_repeatably_and_without_nan(name: str) -> None:
    module = module_of(name)
    for samples in range(1, 9):
        answer = call(module, example_of(name, samples))
        tensors = [*tensors_of(answer)]
        assert tensors
        for tensor in tensors:
            assert not tensor.isnan().any()
        again = call(module_of(name), example_of(name, samples))
        torch.testing.assert_close(tensors, [*tensors_of(again)], rtol=0, atol=0)


def tensors_of(answer: Any) -> Iterator[Tensor]:
    """All tensors of an answer; of JaggedTensors and KeyedTensors their values."""
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, JaggedTensor | KeyedTensor):
        yield answer.values()
    elif isinstance(answer, dict):
        for part in answer.values():
            yield from tensors_of(part)
    elif isinstance(answer, tuple | list):
        for part in answer:
            yield from tensors_of(part)
    elif is_dataclass(answer):
        for field in fields(answer):
            yield from tensors_of(getattr(answer, field.name))


@pytest.mark.parametrize("name", one_in(14, SERVED))
def test_model_is_served_as_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Alone, and merged with others, from examples that its own is not; then also where TorchScript is missing."""
    module = module_of(name)
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=example_of(name, 6))
    with Engine.open(bundle) as engine:
        compare(engine, name, module, (1, 2, 3, 8))
    remove_torchscript(monkeypatch, NoTorchScript.RAISES)
    compare_exported_program(bundle, name, module)


@pytest.mark.parametrize("name", one_in(5, [*SERVED][::10]))
def test_model_is_exported_without_torchscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    remove_torchscript(monkeypatch, NoTorchScript.RAISES)
    module = module_of(name)
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=example_of(name, 6))
    compare_exported_program(bundle, name, module)


def compare_exported_program(bundle: Path, name: str, module: nn.Module) -> None:
    with Engine.open(bundle) as engine:
        assert engine.dense_part is not None
        assert engine.dense_part.file.format is DenseFormat.EXPORTED_PROGRAM
        compare(engine, name, module, (1, 2, 3, 8))


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_by_name(tmp_path: Path, name: str) -> None:
    module = module_of(name)
    with pytest.raises(ModelError, match=f"^{type(module).__name__}: .*{REFUSED[name]}") as refused:
        export_model(module, tmp_path / "r", "m", EXACT, example=example_of(name, 6))
    assert not re.search(r"object at 0x|export_model\(", str(refused.value))  # nor the caller's line


@pytest.mark.parametrize("name", one_in(4, ["batch_by_group", "ids_of_matrix", "bert4rec", "beside_pooled"]))
def test_int8_model_is_served_by_its_stored_rows(tmp_path: Path, name: str) -> None:
    """INT8 tables: the module has the rows of the bundle."""
    module = module_of(name)
    config = replace(EXACT, dtype={"*": WeightDtype.INT8})
    bundle = export_model(module, tmp_path / "r", "m", config, example=example_of(name, 6))
    with_rows_of(bundle, module)
    with Engine.open(bundle) as engine:
        compare(engine, name, module, (1, 5))


@pytest.mark.parametrize("name", one_in(2, ["bits_of_numbers", "history_of_dense_part"]))
def test_float16_tables_answer_float32(tmp_path: Path, name: str) -> None:
    """As TorchRec's collections do, whatever their tables have. Sums are made in float32, too."""
    module = module_of(name)
    for part in [
        submodule
        for submodule in module.modules()
        if isinstance(submodule, EmbeddingBagCollection | EmbeddingCollection)
    ]:
        part.half()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=example_of(name, 6))
    with Engine.open(bundle) as engine:
        compare(engine, name, module.float(), (1, 2, 8))


@pytest.mark.parametrize("name", one_in(4, ["relation_ids", "expert_by_task", "not_finite", "history_of_dense_part"]))
def test_model_on_gpu_is_served_and_stays_there(tmp_path: Path, name: str) -> None:
    module, example = to_gpu(module_of(name)), example_of(name, 6)
    on_gpu = tuple(map(sent, example))
    with pytest.raises(RuntimeError, match="same device"):
        call(module, example)
    before = {key: id(tensor) for key, tensor in module.named_parameters()}
    for number, placed in enumerate((on_gpu, example)):
        bundle = export_model(module, tmp_path / "r", f"m{number}", EXACT, example=placed)
        with Engine.open(bundle) as engine:
            compare(engine, name, module_of(name), (1, 5))
    assert {key: id(tensor) for key, tensor in module.named_parameters()} == before
    assert all(parameter.device == GPU for parameter in module.parameters())
    assert all(tensor.device == GPU for tensor in on_gpu if isinstance(tensor, Tensor))


def with_rows_of(bundle: Path, module: nn.Module) -> None:
    """Give a module the rows of a bundle, as they are stored."""
    for part in module.modules():
        if isinstance(part, EmbeddingBagCollection | EmbeddingCollection):
            tables: Any = part.embedding_bags if isinstance(part, EmbeddingBagCollection) else part.embeddings
            for table, layer in tables.items():
                layer.weight.data = torch.from_numpy(exported_table(bundle, table))


def compare(engine: Engine, name: str, module: nn.Module, sizes: tuple[int, ...]) -> None:
    part = engine.bundle.manifest.dense_part
    assert part is not None
    inputs, outputs, requests, expected = part.inputs, [output.name for output in part.outputs], [], []
    for samples in sizes:
        example = example_of(name, samples, seed=7)
        features, tensors = request_of(name, module, example)
        dense = {dense_input.name: tensors[dense_input.name] for dense_input in inputs}
        right = answer_of_call(module, example)
        if name in SQUEEZED and samples == 1:
            right = {name: numbers[np.newaxis] for name, numbers in right.items()}
        right = {
            output: np.moveaxis(right[output], 1, 0) if (name, output) in MOVED else right[output] for output in right
        }
        weighted = [key for key, feature in features.items() if isinstance(feature, dict) and "weights" in feature]
        scores = engine.score(features, dense)
        assert_close(scores, right)
        assert [*scores] == outputs
        requests.append(replace(encode(features, weighted), outputs=outputs, dense=encode_dense(inputs, dense)))
        expected.append(right)
    together = engine.answer([accept(engine.schema, request) for request in requests]).outcomes()
    for merged, right in zip(together, expected, strict=True):
        assert isinstance(merged, Mapping), merged
        assert_close(merged, right)


def request_of(name: str, module: nn.Module, example: Any) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """The features of an example, and its tensors by their path."""
    features, tensors = request_of_call(module, example)
    keys = {key for part in module.modules() for key in features_of(part)}
    if name in TENSORS:
        features = TENSORS[name](tensors)
    return {key: feature for key, feature in features.items() if key in keys}, tensors


def features_of(module: nn.Module) -> Iterator[str]:
    configs: Any = ()
    if isinstance(module, EmbeddingBagCollection):
        configs = module.embedding_bag_configs()
    elif isinstance(module, EmbeddingCollection):
        configs = module.embedding_configs()
    for config in configs:
        yield from config.feature_names


def of_parts(values: str, lengths: str) -> Callable[[dict[str, Numbers]], dict[str, Any]]:
    def features(tensors: dict[str, Numbers]) -> dict[str, Any]:
        tensors_of_keys = [torch.from_numpy(tensors[input_name]) for input_name in (values, lengths)]
        keyed = KeyedJaggedTensor(list(ORDER), tensors_of_keys[0], lengths=tensors_of_keys[1])
        return {key: column_of(keyed[key]) for key in ORDER}

    return features


def of_offsets(tensors: dict[str, Numbers]) -> dict[str, Any]:
    values, offsets = (torch.from_numpy(tensors[name]) for name in ("values", "offsets"))
    keyed = KeyedJaggedTensor(list(ORDER), values, lengths=offsets.diff())
    return {key: column_of(keyed[key]) for key in ORDER}


def of_pairs(*keys: str) -> Callable[[dict[str, Numbers]], dict[str, Any]]:
    def features(tensors: dict[str, Numbers]) -> dict[str, Any]:
        return {key: {name: tensors[f"data.{key}.{name}"] for name in ("values", "lengths")} for key in keys}

    return features


def of_matrix(tensors: dict[str, Numbers]) -> dict[str, Any]:
    return dict(zip(ORDER, tensors["ids"].T.tolist(), strict=True))


# Models whose ids are tensors: the bags in them.
TENSORS: dict[str, Callable[[dict[str, Numbers]], dict[str, Any]]] = {
    **dict.fromkeys(("ids_of_matrix", "ids_of_lists", "ids_of_made_offsets"), of_matrix),
    "ids_of_columns": lambda tensors: dict(
        zip(ORDER, (tensors[name].tolist() for name in ("user_ids", "item_ids", "words")), strict=True)
    ),
    "heads_in_batch": lambda tensors: {"visited": tensors["events"].tolist()},
    "ids_of_offsets": of_offsets,
    "values_and_lengths": of_parts("values", "lengths"),
    "values_and_lengths_by_key": of_pairs(*ORDER),
    "values_and_lengths_split": of_parts("values", "lengths"),
    "events_by_part": of_pairs("seen", "target", "visited"),
    "dict_of_tensors": of_parts("batch.id_list_features.values", "batch.id_list_features.lengths"),
}
