"""Rules for products of matrices: with a matrix that is the same for all items, they are linear layers."""

import torch

from export.user_side.builder import Builder
from export.user_side.call import Call
from export.user_side.layers import apply_linear, sum_of_product
from export.user_side.pairs import products_of_rows
from export.user_side.shapes import permuted
from export.user_side.values import ITEMS, Part, Product, Value

_ATEN = torch.ops.aten


def linear(call: Call) -> Value | None:
    """A linear layer with a weight that is the same for all items."""
    value, weight, bias = call.value(0), call.value(1), call.value(2)
    if value is None or not isinstance(weight, Part) or not weight.per_user or not isinstance(bias, Part | None):
        return None
    if weight.size != weight.shape or (bias is not None and bias.size != bias.shape):
        return None
    return apply_linear(call.build, value, weight, bias)


def addmm(call: Call) -> Value | None:
    """A linear layer with a bias, as `addmm` writes it."""
    bias, value, weight = call.value(0), call.value(1), call.value(2)
    if not (isinstance(bias, Part) and isinstance(weight, Part)) or value is None or call.node.kwargs:
        return None
    if not (bias.per_user and weight.per_user) or len(bias.shape) != 1 or weight.size != weight.shape:
        return None
    return apply_linear(call.build, value, _transposed(call.build, weight), bias)


def matmul(call: Call) -> Value | None:
    """A product of matrices of which one is the same for all items is a linear layer."""
    build, first, second = call.build, call.value(0), call.value(1)
    if first is None or second is None:
        return None
    if (matrix := _matrix_of(build, second)) is not None and len(first.shape) >= 2:
        return apply_linear(build, first, _transposed(build, matrix), None)
    if (matrix := _matrix_of(build, first)) is not None and len(second.shape) >= 2:
        order = [*range(len(second.shape) - 2), len(second.shape) - 1, len(second.shape) - 2]
        columns = apply_linear(build, permuted(build, second, order), matrix, None)
        return permuted(build, columns, order)
    return products_of_rows(build, first, second)


def total(call: Call) -> Value | None:
    """The sum of a product, which is a product of matrices."""
    value, dims = call.value(0), call.argument(1)
    if value is None or not dims or not isinstance(dims, list | tuple) or "dtype" in call.node.kwargs:
        return None
    rank = len(value.shape)
    dims = [dim % rank for dim in dims]
    if any(value.shape[dim] == ITEMS for dim in dims):
        return None
    if isinstance(value, Product):
        return sum_of_product(call.build, value, dims, call.shape)
    return None


def _transposed(build: Builder, matrix: Part) -> Part:
    size = matrix.size[::-1]
    return Part(build.call(_ATEN.transpose, matrix.node, 0, 1), size, size, matrix.per_user)


def _matrix_of(build: Builder, value: Value) -> Part | None:
    """The matrix [M, N] that a value is for all items, or None."""
    if not isinstance(value, Part) or not value.per_user:
        return None
    if len(value.size) == 2 and value.size == value.shape:
        return value
    if len(value.size) == 3 and value.size[0] == 1 and value.size[1:] == value.shape[1:]:
        return build.reshaped(value, value.size[1:])
    return None
