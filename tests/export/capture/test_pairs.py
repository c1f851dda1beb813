"""KJTs that a forward makes of values and lengths of each key: served as it answers by itself, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from tests.support.asked import assert_close, column_of
from tests.support.forms_inputs import DIM, POOLED, ids, numbers
from tests.support.models import collection
from tests.support.often import one_in
from tests.support.scored import EXACT

KEYS = ["user_id", "item_id", "words"]
Data = dict[str, Tensor]


class Making(nn.Module):
    def __init__(self, make: Callable[[Data], KeyedJaggedTensor], *, weighted: bool = False) -> None:
        super().__init__()
        specs = [replace(each, pooling="SUM") for each in POOLED] if weighted else POOLED
        self.bags = collection(specs, weighted=weighted)
        self.top = nn.Linear(3 * DIM, 2)
        self.make = make

    def forward(self, data: Data) -> Tensor:
        return self.top(self.bags(self.make(data)).values()) + data["price"]  # type: ignore[no-any-return]


def each(data: Data, what: str, keys: list[str] = KEYS) -> Tensor:
    return torch.cat([data[f"{key}.{what}"] for key in keys])


def joined(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, each(data, "values"), lengths=each(data, "lengths"))


def in_another_order(data: Data) -> KeyedJaggedTensor:
    keys = KEYS[::-1]
    return KeyedJaggedTensor.from_lengths_sync(keys, each(data, "values", keys), each(data, "lengths", keys))


def permuted(data: Data) -> KeyedJaggedTensor:
    return joined(data).permute([2, 0, 1])


def sent_to_a_device(data: Data) -> KeyedJaggedTensor:
    return joined(data).to(torch.device("cpu"), non_blocking=True)


def lengths_as_int64(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, each(data, "values"), lengths=each(data, "lengths").long())


def of_jagged_tensors(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict(
        {key: JaggedTensor(data[f"{key}.values"], lengths=data[f"{key}.lengths"]) for key in KEYS}
    )


def split_and_joined(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.concat(joined(data).split([1, 2]))


def of_each_key(data: Data) -> KeyedJaggedTensor:
    keyed = joined(data)
    return KeyedJaggedTensor.from_jt_dict({key: keyed[key] for key in KEYS})


def of_dict(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict(joined(data).to_dict())


def weighted(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, each(data, "values"), each(data, "weights"), lengths=each(data, "lengths"))


def weighted_and_split(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.concat(weighted(data).split([2, 1]))


def hashed(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, each(data, "values") % 20, lengths=each(data, "lengths"))


def hashed_in_place(data: Data) -> KeyedJaggedTensor:
    data["words.values"].remainder_(20)
    return joined(data)


def turned(data: Data) -> KeyedJaggedTensor:
    values = torch.cat([data["user_id.values"], data["item_id.values"], data["words.values"].flip(0)])
    return KeyedJaggedTensor(KEYS, values, lengths=each(data, "lengths"))


def of_another_key(data: Data) -> KeyedJaggedTensor:
    lengths = torch.cat([data["user_id.lengths"], data["user_id.lengths"], data["words.lengths"]])
    return KeyedJaggedTensor(KEYS, each(data, "values"), lengths=lengths)


def cut_elsewhere(data: Data) -> KeyedJaggedTensor:
    """Behind as many ids as another key has, which in the example is the same."""
    values, counts = each(data, "values"), [data[f"{key}.lengths"].sum().item() for key in KEYS]
    parts = [values[: counts[0]], values[counts[2] : counts[2] + counts[1]], values[counts[0] + counts[1] :]]
    return KeyedJaggedTensor(KEYS, torch.cat(parts), lengths=each(data, "lengths"))


def cut_by_a_choice(data: Data) -> KeyedJaggedTensor:
    """Behind as many ids as the first key has, unless its first sample has very many."""
    values, counts = each(data, "values"), [data[f"{key}.lengths"].sum().item() for key in KEYS]
    both = torch.tensor([counts[0], counts[1]])
    first = both[int((data["user_id.lengths"][0] // 1000).clamp(max=1).item())].item()
    return KeyedJaggedTensor(KEYS, torch.cat([values[:first], values[first:]]), lengths=each(data, "lengths"))


def lengths_limited(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, each(data, "values"), lengths=each(data, "lengths").clamp(max=5))


def weights_doubled(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, each(data, "values"), each(data, "weights") * 2, lengths=each(data, "lengths"))


SERVED = [
    joined, in_another_order, permuted, sent_to_a_device, lengths_as_int64, of_jagged_tensors, split_and_joined,
    of_each_key, of_dict,
]  # fmt: skip
REFUSED: dict[Callable[[Data], KeyedJaggedTensor], str] = {
    hashed: "makes the ids of the keys 'user_id', 'item_id', 'words' by aten.remainder.Scalar at .*, line",
    hashed_in_place: "makes the ids of the keys .* by aten.remainder_.Scalar at .*, line",
    turned: "gives a collection ids of key 'words' that are not those of one sample of the example",
    of_another_key: "makes the ids of key 'item_id' itself at .*, line",
    cut_elsewhere: "ids of key 'item_id' that are not those of one sample|in a way that cannot be done for any number",
    cut_by_a_choice: "makes the ids of the keys .* by .* at .*, line|cannot be followed",
    lengths_limited: "by aten.clamp.default at .*, line|fails for the example at .*, line .*ids, and lengths that",
    weights_doubled: "makes the ids of the keys .* by aten.mul.Tensor at .*, line",
}


def data_of(samples: int, seed: int, most: int = 4, same: int | None = None) -> Data:
    """`same`: so many ids in each sample of all keys."""
    random = np.random.default_rng(seed)
    least, most = (0, most) if same is None else (same, same)
    keyed = ids(random, samples, *KEYS, least=least, most=most)
    found = {"price": numbers(random, samples, 2), "seen.lengths": torch.ones(samples, dtype=torch.int32)}
    for key in KEYS:
        found |= {f"{key}.values": keyed[key].values(), f"{key}.lengths": keyed[key].lengths()}
        found[f"{key}.weights"] = numbers(random, keyed[key].values().numel())
    return found


def compare(path: Path, module: nn.Module) -> None:
    is_weighted = module.bags.is_weighted()  # type: ignore[operator,union-attr]
    with Engine.open(path) as engine:
        for samples, seed in ((1, 11), (2, 12), (3, 13), (40, 14)):
            data = data_of(samples, seed, most=9)
            features = {}
            for key in KEYS:
                weights = data[f"{key}.weights"] if is_weighted else None
                jagged = JaggedTensor(data[f"{key}.values"], weights=weights, lengths=data[f"{key}.lengths"])
                features[key] = column_of(jagged)
            with torch.no_grad():
                right = {"scores": module(data).numpy()}
            assert_close(engine.score(features, {"data.price": data["price"].numpy()}), right)


@pytest.mark.parametrize(("make", "same"), one_in(4, [(make, same) for same in (None, 1, 3) for make in SERVED]))
def test_values_and_lengths_of_each_key_are_features(
    tmp_path: Path, make: Callable[[Data], KeyedJaggedTensor], same: int | None
) -> None:
    """Also where an example has one id, or as many, in each sample, and other tensors have such numbers, too."""
    module = Making(make).eval()
    compare(export_model(module, tmp_path / "r", "m", EXACT, example=(data_of(6, 0, same=same),)), module)


@pytest.mark.parametrize("make", [weighted, weighted_and_split])
def test_weights_of_each_key_are_those_of_its_feature(
    tmp_path: Path, make: Callable[[Data], KeyedJaggedTensor]
) -> None:
    module = Making(make, weighted=True).eval()
    compare(export_model(module, tmp_path / "r", "m", EXACT, example=(data_of(6, 0),)), module)


@pytest.mark.parametrize(
    ("is_small", "make"), one_in(2, [(small, make) for small in (True, False) for make in REFUSED])
)
def test_values_and_lengths_that_are_changed_are_refused_by_name(
    tmp_path: Path, make: Callable[[Data], KeyedJaggedTensor], is_small: bool
) -> None:
    """Also where an example, whose ids are small and few, would not show it."""
    module = Making(make, weighted=make is weights_doubled).eval()
    data = data_of(6, 0, most=4 if is_small else 9)
    if make is of_another_key:
        data["item_id.lengths"] = data["user_id.lengths"].clone()
        data["item_id.values"] = torch.arange(int(data["user_id.lengths"].sum()))
    for key in KEYS if is_small else ():
        data[f"{key}.values"] %= 10
    if make is cut_elsewhere:
        data |= {f"words.{what}": data[f"user_id.{what}"].clone() for what in ("values", "lengths")}
    if make is turned and is_small:
        data["words.values"][:] = 3
    with pytest.raises(ModelError, match=f"^Making: .*({REFUSED[make]})"):
        export_model(module, tmp_path / "r", "m", EXACT, example=(data,))
