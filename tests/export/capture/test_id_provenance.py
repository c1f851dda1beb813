"""Forwards that change ids before their collections see them: served as they answer by themselves, or refused.

Each is compared for ids, lengths and samples that its example never had.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec import KeyedJaggedTensor as Keyed

from export import export_model
from export.errors import ExportError
from serving.engine import Engine
from tests.models.inputs import DIM, POOLED, ids, numbers, of
from tests.support.long_cases import one_in
from tests.support.managed_collision import collection_behind, mch, trained
from tests.support.models import Spec, collection
from tests.support.module_calls import answer_of_call, assert_close, request_of_call
from tests.support.scored_models import EXACT

ORDER = ["user_id", "item_id", "words"]


class Changing(nn.Module):
    """What its collection gets is made by a function of it, the ids as a KJT, others as tensors, and numbers."""

    def __init__(self, change: Callable[..., Any], weighted: bool = False) -> None:
        super().__init__()
        self.bags = collection(POOLED, weighted=weighted)
        self.top = nn.Linear(3 * DIM, 2)
        self.state: Any = None
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.change = change

    def forward(self, keyed: Keyed, ids: Tensor, price: Tensor) -> Tensor:
        return self.top(self.bags(self.change(self, keyed, ids, price)).values()) + price  # type: ignore[no-any-return]


def example(seed: int, samples: int, weighted: bool = False, most: int = 4, lowest: int = 0) -> tuple[Any, ...]:
    """Ids of an example are small; those of other ones are not."""
    random = np.random.default_rng(seed)
    keyed = ids(random, samples, *ORDER, most=most)
    values = keyed.values() if lowest else keyed.values() % 10
    weights = numbers(random, values.numel()) if weighted else None
    keyed = Keyed(ORDER, values, weights, lengths=keyed.lengths())
    return keyed, of(random, 40 if lowest else 10, samples, 3), numbers(random, samples, 2)


# -- with a KJT of the example


def clamped(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().clamp(max=20), lengths=keyed.lengths())


def clamped_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.values().clamp_(max=20)
    return keyed


def a_slice_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.values()[1:] = 3
    return keyed


def one_key_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed["user_id"].values().clamp_(max=15)
    return keyed


def one_key_of_dict_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.to_dict()["user_id"].values().remainder_(15)
    return keyed


def by_unfold_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.values().unfold(0, 1, 1).clamp_(max=20)
    return keyed


def by_ravel_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.values().unsqueeze(0).swapaxes(0, 1).ravel().clamp_(max=20)
    return keyed


def by_as_strided_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    values = keyed.values()
    torch.as_strided(values, (values.size(0),), (1,)).clamp_(max=20)
    return keyed


def by_data_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.values().data.clamp_(max=20)
    return keyed


def by_mask_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.values()[keyed.values() > 20] = 20
    return keyed


def by_out_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    torch.clamp(keyed.values(), max=20, out=keyed.values())
    return keyed


def by_tensor_split_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.values().tensor_split([2])[0].clamp_(max=20)
    return keyed


def values_replaced(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed._values = keyed._values % 21
    return keyed


def weights_replaced(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed._weights = keyed._weights * 2
    return keyed


def lengths_replaced(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed._lengths = keyed._lengths.clamp(max=4)
    return keyed


def offsets_replaced(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed._offsets = torch.clamp(keyed.offsets() - 1, min=0)
    return keyed


def offsets_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.offsets().sub_(1).clamp_(min=0)
    return keyed


def offsets_by_slice_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.offsets()[1:-1] -= 1
    keyed.offsets()[1:-1].clamp_(min=0)
    return keyed


def jagged_of_dict_replaced(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.to_dict()["user_id"]._values = keyed["user_id"].values().clamp(max=15)
    return keyed


def dict_replaced(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    result = keyed.to_dict()
    keyed._jt_dict = {
        **result,
        "user_id": JaggedTensor(result["user_id"].values() % 9, lengths=result["user_id"].lengths()),
    }
    return keyed


def sizes_replaced(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    first, second, third = keyed.length_per_key()
    keyed._length_per_key = [second, first, third]
    keyed._offset_per_key = [0, second, first + second, first + second + third]
    return keyed


def keys_swapped(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(["item_id", "user_id", "words"], keyed.values(), lengths=keyed.lengths())


def keys_swapped_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed._keys = ["item_id", "user_id", "words"]
    return keyed


def lengths_of_other_keys(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    by_key = keyed.lengths().view(3, -1)
    return Keyed(keyed.keys(), keyed.values(), lengths=torch.cat([by_key[1], by_key[0], by_key[2]]))


def lengths_of_other_samples(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    by_key = keyed.lengths().view(3, -1)
    moved = torch.cat([by_key[:, :1], by_key[:, 2:-1], by_key[:, 1:2], by_key[:, -1:]], dim=1)
    return Keyed(keyed.keys(), keyed.values(), lengths=moved[:, : by_key.size(1)].reshape(-1))


def lengths_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.lengths().view(3, -1)[0].clamp_(max=2)
    return keyed


def truncated(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    shortened = {}
    for key, tensor in keyed.to_dict().items():
        padded = tensor.to_padded_dense(3)
        lengths = tensor.lengths().clamp(max=3)
        shortened[key] = JaggedTensor(padded[torch.arange(3) < lengths.unsqueeze(1)].long(), lengths=lengths)
    return Keyed.from_jt_dict(shortened)


def weights_doubled(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values(), keyed.weights() * 2, lengths=keyed.lengths())


def weights_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    keyed.weights().mul_(2)
    return keyed


def weights_made(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values(), torch.ones_like(keyed.values()).float(), lengths=keyed.lengths())


def weights_of_other_ids(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values(), keyed.weights().flip(0), lengths=keyed.lengths())


def weights_of_ids(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values(), keyed.values().float(), lengths=keyed.lengths())


def plus_zero(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values() + 0, lengths=keyed.lengths())


def where_known(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    values = keyed.values()
    return Keyed(keyed.keys(), torch.where(values < 30, values, torch.zeros_like(values)), lengths=keyed.lengths())


def masked(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().masked_fill(keyed.values() > 30, 1), lengths=keyed.lengths())


def sorted_(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().sort().values, lengths=keyed.lengths())


def unique(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    result, back = keyed.values().unique(return_inverse=True)
    return Keyed(keyed.keys(), result[back], lengths=keyed.lengths())


def hashed(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), (keyed.values() * 2654435761) % 40, lengths=keyed.lengths())


def bits(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values() & 15, lengths=keyed.lengths())


def by_float(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().half().long(), lengths=keyed.lengths())


def by_bool(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().bool().long(), lengths=keyed.lengths())


def by_byte(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().to(torch.int8).long(), lengths=keyed.lengths())


def by_other_bits(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().int().view(torch.int32), lengths=keyed.lengths())


def flipped(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), keyed.values().flip(0), lengths=keyed.lengths())


def rolled(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), torch.cat([keyed.values()[1:], keyed.values()[:1]]), lengths=keyed.lengths())


def a_copy_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    values = keyed.values().clone()
    values[1:] %= 7
    return Keyed(keyed.keys(), values, lengths=keyed.lengths())


def a_copy_of_lengths_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    lengths = keyed.lengths().clone()
    lengths.view(3, -1)[1].copy_(keyed.lengths().view(3, -1)[0])
    return Keyed(keyed.keys(), keyed.values(), lengths=lengths)


def made_in_place(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    values = torch.empty_like(keyed.values())
    values[:] = keyed.values() % 7
    return Keyed(keyed.keys(), values, lengths=keyed.lengths())


def one_key_for_another(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed.from_jt_dict({"user_id": keyed["words"], "item_id": keyed["item_id"], "words": keyed["words"]})


def by_jagged_dict(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    answer = keyed.to_dict()
    return Keyed.from_jt_dict(
        {**answer, "words": JaggedTensor(answer["words"].values() % 9, lengths=answer["words"].lengths())}
    )


def joined_and_changed(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    user, rest = keyed.split([1, 2])
    user._values = user._values.clamp(max=20)
    return Keyed.concat([user, rest])


def permuted_twice(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return keyed.permute([2, 0, 1]).permute([1, 2, 0])


def permuted_and_renamed(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    moved = keyed.permute([1, 0, 2])
    return Keyed(keyed.keys(), moved.values(), lengths=moved.lengths())


def a_key_twice(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    moved = keyed.permute([0, 0, 2])
    return Keyed(keyed.keys(), moved.values(), lengths=moved.lengths())


def branching_on_ids(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    if keyed.values().max() > 20:
        return Keyed(keyed.keys(), keyed.values() % 20, lengths=keyed.lengths())
    return keyed


def branching_on_their_number(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    if keyed.values().numel() > 60:
        return Keyed(keyed.keys(), keyed.values() % 20, lengths=keyed.lengths())
    return keyed


def branching_on_the_number_of_a_key(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    if keyed["user_id"].values().size(0) > 40:
        return Keyed(keyed.keys(), keyed.values() % 20, lengths=keyed.lengths())
    return keyed


def branching_on_samples(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    if keyed.stride() > 7:
        return Keyed(keyed.keys(), keyed.values() % 20, lengths=keyed.lengths())
    return keyed


def branching_on_one_sample(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    if keyed.stride() == 1:
        return Keyed(keyed.keys(), keyed.values() % 20, lengths=keyed.lengths())
    return keyed


def branching_on_length_per_key(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    if max(keyed.length_per_key()) > 30:
        return Keyed(keyed.keys(), keyed.values() % 20, lengths=keyed.lengths())
    return keyed


def counting(self: Any, keyed: Keyed, *_: Any) -> Keyed:
    self.state = (self.state or 0) + 1
    if self.state > 1:
        return Keyed(keyed.keys(), keyed.values() % 3, lengths=keyed.lengths())
    return keyed


def remembering(self: Any, keyed: Keyed, *_: Any) -> Keyed:
    if self.state is None:
        self.state = keyed
    return self.state


def remembering_values(self: Any, keyed: Keyed, *_: Any) -> Keyed:
    if self.state is None:
        self.state = keyed.values().clone()
    return Keyed(keyed.keys(), self.state, lengths=keyed.lengths())


def of_lists(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(
        keyed.keys(), torch.tensor([value % 20 for value in keyed.values().tolist()]), lengths=keyed.lengths()
    )


def of_numpy(_: Any, keyed: Keyed, *__: Any) -> Keyed:
    return Keyed(keyed.keys(), torch.from_numpy(keyed.values().numpy() % 20), lengths=keyed.lengths())


def writing_the_table(self: Any, keyed: Keyed, *_: Any) -> Keyed:
    self.bags.embedding_bags["user"].weight.data[3].mul_(0.5)
    return keyed


# -- with tensors of the example


def keyed_of(values: Tensor, lengths: Tensor | None = None) -> Keyed:
    return Keyed(ORDER, values, lengths=torch.ones(values.numel(), dtype=torch.int32) if lengths is None else lengths)


def columns(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids.t().reshape(-1))


def columns_in_another_order(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(torch.cat([ids[:, 2], ids[:, 0], ids[:, 1]]))


def columns_by_short_integers(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids.t().reshape(-1).int().long())


def columns_flipped(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids.flip(1).t().reshape(-1))


def rows_not_columns(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids.reshape(-1))


def samples_flipped(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids.flip(0).t().reshape(-1))


def samples_rolled(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids.roll(1, 0).t().reshape(-1))


def samples_moved(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(torch.cat([ids[1:], ids[:1]]).t().reshape(-1))


def one_column_for_all(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids[:, 0].repeat(3))


def one_column_expanded(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids[:, 0].expand(3, -1).reshape(-1))


def one_sample_for_all(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids[:1].expand(ids.size(0), -1).t().reshape(-1))


def columns_by_buffer(self: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(ids[:, self.order].t().reshape(-1))


def columns_by_data(_: Any, __: Keyed, ids: Tensor, price: Tensor) -> Keyed:
    return keyed_of(ids.gather(1, (price[:, :1] > 0).long().expand(-1, 3)).t().reshape(-1))


def column_by_item(_: Any, __: Keyed, ids: Tensor, price: Tensor) -> Keyed:
    column = int((price[0, 0] > 0).item())
    torch._check(column >= 0)  # type: ignore[no-untyped-call, unused-ignore]
    torch._check(column < 2)  # type: ignore[no-untyped-call, unused-ignore]
    return keyed_of(torch.cat([ids[:, 0], ids.select(1, column), ids[:, 2]]))


def a_column_in_place(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    ids[:, 0] = 3
    return keyed_of(ids.t().reshape(-1))


def a_column_by_swapaxes_in_place(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    ids.swapaxes(0, 1)[0].clamp_(max=12)
    return keyed_of(ids.t().reshape(-1))


def a_column_of_a_copy_in_place(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    copied = ids.clone()
    copied[:, 0] %= 12
    return keyed_of(copied.t().reshape(-1))


def a_column_of_a_stack_in_place(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    stacked = torch.stack([ids[:, 0], ids[:, 1], ids[:, 2]])
    stacked[0].clamp_(max=12)
    return keyed_of(stacked.reshape(-1))


def constant_lengths_in_place(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    values = ids.t().reshape(-1)
    lengths = torch.ones(values.numel(), dtype=torch.int32)
    lengths[0], lengths[1] = 0, 2
    return keyed_of(values, lengths)


def constant_lengths(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    values = ids.t().reshape(-1)
    first = torch.zeros(1, dtype=torch.int32)
    lengths = torch.cat([first, first + 2, torch.ones(values.numel() - 2, dtype=torch.int32)])
    return keyed_of(values, lengths)


def lengths_of_data(_: Any, __: Keyed, ids: Tensor, price: Tensor) -> Keyed:
    one = (price[:, 0] > -100).int()
    return keyed_of(ids.t().reshape(-1), torch.cat([one, one, one]))


def constants(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(torch.full((3 * ids.size(0),), 2))


def sample_numbers(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    every = torch.arange(1, 3 * ids.size(0) + 1).view(-1, 3)
    return keyed_of(every.t().reshape(-1))


def numbers_of_columns(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    return keyed_of(torch.cat([ids[:, 0], ids[:, 1], torch.arange(3, 3 * ids.size(0) + 1, 3)]))


def lengths_by_position(_: Any, __: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    """From the thirtieth on, none and two in turn: more samples than the export tries."""
    position = torch.arange(ids.numel())
    lengths = torch.ones(ids.numel(), dtype=torch.int64) + (position >= 30) * (position % 2 * 2 - 1)
    return Keyed(ORDER, ids.t().reshape(-1), lengths=lengths)


def a_dense_input(_: Any, __: Keyed, ids: Tensor, price: Tensor) -> Keyed:
    return keyed_of(torch.cat([ids[:, 0], ids[:, 1], price[:, 0].abs().clamp(max=20).long()]))


def a_matrix_and_a_key(_: Any, keyed: Keyed, ids: Tensor, ___: Tensor) -> Keyed:
    lengths = keyed.lengths().view(3, -1)
    return keyed_of(
        torch.cat([ids[:, 0], keyed["item_id"].values(), keyed["words"].values()]),
        torch.cat([torch.ones_like(lengths[0]), lengths[1], lengths[2]]),
    )


# Ids that are served as they are; of tensors, the column that each key has. All others are refused.
SERVED: dict[Callable[..., Any], tuple[int, ...]] = {
    # Collections of TorchRec take lengths, not offsets.
    offsets_replaced: (), offsets_in_place: (), offsets_by_slice_in_place: (), permuted_twice: (),
    columns: (0, 1, 2), columns_by_short_integers: (0, 1, 2), columns_flipped: (2, 1, 0),
    columns_in_another_order: (2, 0, 1),
}  # fmt: skip
OF_KEYS: tuple[Callable[..., Any], ...] = (
    offsets_replaced, offsets_in_place, offsets_by_slice_in_place, permuted_twice,
    clamped, clamped_in_place, a_slice_in_place, one_key_in_place, one_key_of_dict_in_place, by_unfold_in_place,
    by_ravel_in_place, by_as_strided_in_place, by_data_in_place, by_mask_in_place, by_out_in_place,
    by_tensor_split_in_place, values_replaced, lengths_replaced, jagged_of_dict_replaced, dict_replaced,
    sizes_replaced, keys_swapped, keys_swapped_in_place, lengths_of_other_keys, lengths_of_other_samples,
    lengths_in_place, truncated, plus_zero, where_known, masked, sorted_, unique, hashed, bits, by_float, by_bool,
    by_byte, by_other_bits, flipped, rolled, a_copy_in_place, a_copy_of_lengths_in_place, made_in_place,
    one_key_for_another, by_jagged_dict, joined_and_changed, permuted_and_renamed, a_key_twice, branching_on_ids,
    branching_on_their_number, branching_on_the_number_of_a_key, branching_on_samples, branching_on_one_sample,
    branching_on_length_per_key, counting, remembering, remembering_values, of_lists, of_numpy, writing_the_table,
)  # fmt: skip
OF_WEIGHTS: tuple[Callable[..., Any], ...] = (
    weights_replaced, weights_doubled, weights_in_place, weights_made, weights_of_other_ids, weights_of_ids,
)  # fmt: skip
OF_TENSORS: tuple[Callable[..., Any], ...] = (
    columns, columns_in_another_order, columns_by_short_integers, columns_flipped, rows_not_columns, samples_flipped,
    samples_rolled, samples_moved, one_column_for_all, one_column_expanded, one_sample_for_all, columns_by_buffer,
    columns_by_data, column_by_item, a_column_in_place, a_column_by_swapaxes_in_place, a_column_of_a_copy_in_place,
    a_column_of_a_stack_in_place, constant_lengths_in_place, constant_lengths, lengths_of_data, constants,
    sample_numbers, numbers_of_columns, a_dense_input, lengths_by_position,
)  # fmt: skip
CASES = (*OF_KEYS, *OF_WEIGHTS, *OF_TENSORS)


# torch says no line for these, or something else of them is refused before.
WITHOUT_LINE = (sizes_replaced, lengths_of_other_keys, lengths_of_other_samples, remembering, branching_on_one_sample)


@pytest.mark.parametrize("case", one_in(6, CASES), ids=lambda case: case.__name__)
def test_ids_are_served_as_they_are_or_refused(tmp_path: Path, case: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    module = Changing(case, case in OF_WEIGHTS).eval()
    line = None if case in WITHOUT_LINE else r"test_id_provenance\.py, line \d+: `"
    with nullcontext() if case in SERVED else pytest.raises(ExportError, match=line):
        bundle = export_model(module, tmp_path / "r", "m", EXACT, example=of_case(case, 0, 6))
    if case in SERVED:
        compare(case, module, bundle)


def of_case(case: Callable[..., Any], seed: int, samples: int, most: int = 4, lowest: int = 0) -> tuple[Any, ...]:
    keyed, *tensors = example(seed, samples, case in OF_WEIGHTS, most, lowest)
    return (None if case in OF_TENSORS else keyed, *tensors)


def compare(case: Callable[..., Any], module: nn.Module, bundle: Path) -> None:
    """With ids that the example did not have, more of them, and other numbers of samples."""
    with Engine.open(bundle) as engine:
        for samples in (1, 2, 3, 8, 40):
            tensors_of_case = of_case(case, 5, samples, most=9, lowest=1)
            features, tensors = request_of_call(module, tensors_of_case)
            columns = zip(ORDER, SERVED.get(case, ()), strict=False)
            features |= {key: tensors["ids"][:, column].tolist() for key, column in columns}
            assert_close(engine.score(features, {"price": tensors["price"]}), answer_of_call(module, tensors_of_case))


class RawIds(nn.Module):
    """Raw ids of a tensor, which are cast on the way: int32 has not all of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = trained(
            collection_behind({"raw": mch(40)}, [Spec("raw", 40, 8, "SUM", ("raw_ids",))]), keys=("raw_ids",)
        )
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        keyed = Keyed(["raw_ids"], ids.to(self.dtype), lengths=torch.ones(ids.shape[0], dtype=torch.int32))
        answer: Tensor = self.rows(keyed)[0].values().sum(1)
        return answer


def test_raw_ids_that_are_narrowed_are_refused(tmp_path: Path) -> None:
    example = (torch.arange(5),)
    export_model(RawIds(torch.int64), tmp_path, "same", EXACT, example=example)
    with pytest.raises(ExportError, match=r"'raw_ids' by aten.to.dtype at .*: `keyed = "):
        export_model(RawIds(torch.int32), tmp_path, "narrow", EXACT, example=example)
