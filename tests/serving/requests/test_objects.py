"""Torch tensors of every kind become arrays, or are refused by name, wherever they are in a request."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torchrec import KeyedJaggedTensor

from serving.bundle.scores import DenseInput, InputDtype
from serving.errors import InvalidRequest
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode, encode_rows
from serving.requests.objects import array_of, plain

PRICE = DenseInput("price", ())
TIMES = DenseInput("price", (), key="seen")


def negative(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, behind a bit that says that they are to be negated."""
    lazy = torch.complex(torch.zeros_like(numbers), -numbers).conj().imag
    assert lazy.is_neg()
    return lazy


def quantized(numbers: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch is to remove them
        return torch.quantize_per_tensor(numbers, 0.1, 0, torch.quint8)


def complex_of_halves() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls them experimental
        return torch.ones(3, dtype=torch.complex32)


NUMBERS = [0.5, 2.0, 3.0]
TAKEN: dict[str, torch.Tensor] = {
    "float32": torch.tensor(NUMBERS),
    "float64": torch.tensor(NUMBERS, dtype=torch.float64),
    "float16": torch.tensor(NUMBERS, dtype=torch.float16),
    "bfloat16": torch.tensor(NUMBERS, dtype=torch.bfloat16),
    "float8": torch.tensor(NUMBERS).to(torch.float8_e4m3fn),
    "with a gradient": torch.tensor(NUMBERS, requires_grad=True),
    "a result with a gradient": torch.tensor(NUMBERS, requires_grad=True) * 1,
    "a parameter": torch.nn.Parameter(torch.tensor(NUMBERS)),
    "a negative bit": negative(torch.tensor(NUMBERS)),
    "a view": torch.tensor([[0.5, 9], [2, 9], [3, 9]])[:, 0],
    "inference": torch.inference_mode()(lambda: torch.tensor(NUMBERS))(),
}


def kjt(ids: Any, weights: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=ids, weights=weights, lengths=torch.tensor([2, 1]))


# A weight for each of three ids, in each place of a request that takes one.
PLACES_OF_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "a KJT's weights": lambda numbers: encode(kjt(torch.tensor([3, 5, 1]), numbers), "a").weights,
    "a tuple's weights": lambda numbers: encode({"a": ([3, 5, 1], [2, 1], numbers)}, "a").weights,
    "a dict's weights": lambda numbers: encode(
        {"a": {"values": [3, 5, 1], "lengths": [2, 1], "weights": numbers}}, "a"
    ).weights,
    "weights in bags": lambda numbers: encode(
        {"a": {"values": [[3, 5], [1]], "weights": [numbers[:2], numbers[2:]]}}, "a"
    ).weights,
    "numbers among weights": lambda numbers: encode({"a": ([3, 5, 1], [2, 1], [*numbers])}, "a").weights,
    "a dense input": lambda numbers: encode_dense([PRICE], {"price": numbers})["price"],
    "numbers of a dense input": lambda numbers: encode_dense([PRICE], {"price": [*numbers]})["price"],
    "rows of a dense input": lambda numbers: encode_dense([PRICE], {"price": [numbers[:, None][0], *numbers[1:, None]]})[
        "price"
    ],
    "rows of ids": lambda numbers: encode_dense([TIMES], {"price": numbers})["price"],
    "rows of ids in bags": lambda numbers: encode_dense([TIMES], {"price": [numbers[:2], numbers[2:]]})["price"],
}  # fmt: skip


@pytest.mark.parametrize("argument", PLACES_OF_NUMBERS)
@pytest.mark.parametrize("kind", TAKEN)
def test_a_tensor_of_numbers_is_taken(argument: str, kind: str) -> None:
    encoded = PLACES_OF_NUMBERS[argument](TAKEN[kind])
    assert encoded.dtype == np.float32
    assert encoded.tolist() == NUMBERS


with FakeTensorMode():
    FAKE = torch.ones(3)
REFUSED: dict[str, tuple[torch.Tensor, str]] = {
    "meta": (torch.ones(3, device="meta"), "got a tensor on the device meta, which holds no numbers"),
    "sparse": (torch.ones(3).to_sparse(), r"got a tensor of the layout torch.sparse_coo: .* tensor.to_dense\(\)"),
    "mkldnn": (torch.ones(3).to_mkldnn(), r"got a tensor of the layout torch._mkldnn: .* tensor.to_dense\(\)"),
    "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "got a nested tensor: give its values"),
    "jagged": (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
        "got a nested tensor: give its values",
    ),
    "quantized": (
        quantized(torch.ones(3)),
        r"got a quantized tensor of torch.quint8: .* tensor.dequantize\(\)",
    ),
    "fake": (FAKE, r"got a FakeTensor of torch.float32 without an array: .numpy\(\) is not supported"),
    "masked": (
        torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
        "got a MaskedTensor of torch.float32 without an array",
    ),
    "complex32": (complex_of_halves(), "got a Tensor of torch.complex32 without an array"),
    "complex": (torch.ones(3, dtype=torch.complex64).conj(), "complex(64|128)"),
}
PLACES_OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    "ids": lambda tensor: encode({"a": tensor}),
    "a bag": lambda tensor: encode({"a": [[3], tensor]}),
    "a tuple's ids": lambda tensor: encode({"a": (tensor, [2, 1])}),
    "a tuple's lengths": lambda tensor: encode({"a": ([3, 5, 1], tensor)}),
    "a tuple's weights": lambda tensor: encode({"a": ([3, 5, 1], [2, 1], tensor)}, "a"),
    "ids of two columns": lambda tensor: encode({"a": {"values": tensor, "weights": [1.0, 2.0, 3.0]}}, "a"),
    "rows of a table": lambda tensor: encode_rows("a", tensor, weighted=False),
    "a dense input": lambda tensor: encode_dense([PRICE], {"price": tensor}),
    "an integer input": lambda tensor: encode_dense([DenseInput("price", (), InputDtype.INT64)], {"price": tensor}),
    "a row": lambda tensor: encode_dense([DenseInput("price", (3,))], {"price": [[1, 2, 3], tensor]}),
    "rows of ids": lambda tensor: encode_dense([TIMES], {"price": tensor}),
    "a bag of rows": lambda tensor: encode_dense([TIMES], {"price": [[3], tensor]}),
}


@pytest.mark.parametrize("argument", PLACES_OF_TENSORS)
@pytest.mark.parametrize("kind", REFUSED)
def test_another_tensor_is_refused_by_name(argument: str, kind: str) -> None:
    tensor, message = REFUSED[kind]
    with pytest.raises(InvalidRequest, match=rf"^(feature|table|dense input) '(a|price)': .*{message}"):
        PLACES_OF_TENSORS[argument](tensor)


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU. This machine may have none."""

    device: Any = torch.device("cuda:1")


def test_a_tensor_on_another_device_is_refused_by_name() -> None:
    tensor = torch.ones(3).as_subclass(OnCuda)
    with pytest.raises(InvalidRequest, match=r"got a tensor on the device cuda:1: copy it, tensor.cpu\(\)"):
        encode_dense([PRICE], {"price": tensor})


def test_a_kjt_without_numbers_is_refused_by_name() -> None:
    for features in (
        kjt(torch.tensor([3, 5, 1], device="meta"), None),
        KeyedJaggedTensor(["a"], torch.tensor([3, 5]), lengths=torch.tensor([1, 1], device="meta")),
    ):
        with pytest.raises(
            InvalidRequest, match=r"^KeyedJaggedTensor '(values|lengths)': .* got a tensor on the device meta"
        ):
            encode(features)
    with pytest.raises(InvalidRequest, match=r"^KeyedJaggedTensor 'weights': .* got a quantized tensor"):
        encode(kjt(torch.tensor([3, 5, 1]), REFUSED["quantized"][0]), "a")


def test_inputs_without_objects_are_not_copied() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert np.shares_memory(plain(tensor), tensor.numpy())
    for numbers in ([[1, 2], [3]], ([1], [1]), np.array([1, 2]), [np.array([1])], "text", None):
        assert plain(numbers) is numbers


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequest, match=r"^feature 'a': expected integers"):
        encode({"a": endless})
    with pytest.raises(InvalidRequest, match=r"^dense input 'price': expected "):
        encode_dense([PRICE], {"price": endless})


def test_integers_are_exact() -> None:
    for numbers, dtype in (
        ([np.int64(1), np.uint64(2)], np.int64),
        ([[np.int64(1), np.uint64(2**63)]], np.uint64),
        (np.array([np.int64(2**62 + 1), np.uint64(2)], object), np.int64),
    ):
        array = array_of(numbers)
        assert array.dtype == dtype
        assert array.tolist() == np.asarray(numbers, object).tolist()
