"""What is asked for the example of a call: the features and dense inputs of a request; and what the module answers.

It shares no code with `export`: how an example is read there, and how its answers are named, is what it checks.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from serving.engine import Engine

Numbers = npt.NDArray[Any]


def request_of_call(module: nn.Module, example: Any) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """The features in an example; and its tensors by their path, whether they are dense inputs or not. Values of keys
    are among both: they may be ids, or numbers of ids.
    """
    features: dict[str, Any] = {}
    tensors: dict[str, Numbers] = {}
    names = list(inspect.signature(module.forward).parameters)
    for path, leaf in leaves_of_call(
        "", example if isinstance(example, dict) else dict(zip(names, example, strict=False))
    ):
        if isinstance(leaf, KeyedJaggedTensor):
            for key in leaf.keys():  # noqa: SIM118  no mapping
                features[key], tensors[key] = column_of(leaf[key]), leaf[key].values().numpy()
        elif isinstance(leaf, JaggedTensor):
            features[path.rpartition(".")[2]], tensors[path] = column_of(leaf), leaf.values().numpy()
        else:
            tensors[path] = leaf.numpy()
    return features, tensors


def column_of(jagged: JaggedTensor) -> dict[str, Numbers]:
    column = {"values": jagged.values().numpy(), "lengths": jagged.lengths().numpy()}
    return column if jagged.weights_or_none() is None else {**column, "weights": jagged.weights().numpy()}


def leaves_of_call(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and jagged tensors in a value, with their paths."""
    if isinstance(value, Tensor | KeyedJaggedTensor | JaggedTensor):
        yield path, value
    elif isinstance(value, KeyedTensor):
        yield path, value.values()
    else:
        for name, part in children(value):
            yield from leaves_of_call(f"{path}.{name}" if path else name, part)


def children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, list | tuple):
        return [(str(number), element) for number, element in enumerate(value)]
    return list(vars(value).items()) if hasattr(value, "__dict__") else []


def answer_of_call(module: nn.Module, example: Any) -> dict[str, Numbers]:
    """The tensors that a module answers to an example, run by TorchRec, by the names that they are served by."""
    with torch.no_grad():
        answer = module(**example) if isinstance(example, dict) else module(*example)
    return {name: tensor.float().numpy() for name, tensor in leaves_of_answer("", answer)}


def leaves_of_answer(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor | JaggedTensor):
        yield path or "scores", value if isinstance(value, Tensor) else value.values()
        return
    if isinstance(value, KeyedTensor):
        value = value.to_dict()
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        for name, element in value.items():
            yield from leaves_of_answer(f"{path}.{name}" if path else name, element)
    elif isinstance(value, list | tuple):
        for number, element in enumerate(value):
            yield from leaves_of_answer(f"{path or 'scores'}_{number}", element)


def assert_served(bundle: Path, module: nn.Module, example: Any) -> None:
    """That a bundle scores an example as its module answers. Keys and paths of the example are names of the request."""
    features, tensors = request_of_call(module, example)
    with Engine.open(bundle) as engine:
        dense = {name: numbers for name, numbers in tensors.items() if name not in features}
        assert_close(engine.score(features, dense), answer_of_call(module, example))


def assert_close(scores: Mapping[str, Numbers], right: Mapping[str, Numbers], tolerance: float = 1e-5) -> None:
    """That each output that is served is right but for rounding, relative to its largest number."""
    for name, numbers in scores.items():
        expected = right[name]
        assert numbers.shape == expected.shape, f"{name}: {numbers.shape}, not {expected.shape}"
        scale = float(np.abs(expected).max(initial=0))
        np.testing.assert_allclose(numbers, expected, rtol=0, atol=tolerance * max(scale, 1e-3), err_msg=name)
