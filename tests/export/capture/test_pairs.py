"""KJTs that a forward makes of values and lengths of each key: served as it answers by itself, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from serving.errors import InvalidRequest
from tests.models.inputs import DIM, POOLED, ROWS, ids, numbers
from tests.support.long_cases import one_in
from tests.support.models import collection
from tests.support.module_calls import assert_close, column_of
from tests.support.scored_models import EXACT
from tests.support.sequence_models import sequences

KEYS = ["user_id", "item_id", "words"]
Data = dict[str, Tensor]


class Making(nn.Module):
    def __init__(self, make: Callable[[Data], KeyedJaggedTensor], *, weighted: bool = False) -> None:
        super().__init__()
        specs = [replace(spec, pooling="SUM") for spec in POOLED] if weighted else POOLED
        self.bags = collection(specs, weighted=weighted)
        self.top = nn.Linear(3 * DIM, 2)
        self.make = make

    def forward(self, data: Data) -> Tensor:
        return self.top(self.bags(self.make(data)).values()) + data["price"]  # type: ignore[no-any-return]


def joined_by_key(data: Data, what: str, keys: list[str] = KEYS) -> Tensor:
    return torch.cat([data[f"{key}.{what}"] for key in keys])


def joined(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, joined_by_key(data, "values"), lengths=joined_by_key(data, "lengths"))


def in_another_order(data: Data) -> KeyedJaggedTensor:
    keys = KEYS[::-1]
    return KeyedJaggedTensor.from_lengths_sync(
        keys, joined_by_key(data, "values", keys), joined_by_key(data, "lengths", keys)
    )


def permuted(data: Data) -> KeyedJaggedTensor:
    return joined(data).permute([2, 0, 1])


def sent_to_a_device(data: Data) -> KeyedJaggedTensor:
    return joined(data).to(torch.device("cpu"), non_blocking=True)


def lengths_as_int64(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, joined_by_key(data, "values"), lengths=joined_by_key(data, "lengths").long())


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
    return KeyedJaggedTensor(
        KEYS, joined_by_key(data, "values"), joined_by_key(data, "weights"), lengths=joined_by_key(data, "lengths")
    )


def weighted_and_split(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.concat(weighted(data).split([2, 1]))


def hashed(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, joined_by_key(data, "values") % 20, lengths=joined_by_key(data, "lengths"))


def hashed_in_place(data: Data) -> KeyedJaggedTensor:
    data["words.values"].remainder_(20)
    return joined(data)


def turned(data: Data) -> KeyedJaggedTensor:
    values = torch.cat([data["user_id.values"], data["item_id.values"], data["words.values"].flip(0)])
    return KeyedJaggedTensor(KEYS, values, lengths=joined_by_key(data, "lengths"))


def of_another_key(data: Data) -> KeyedJaggedTensor:
    lengths = torch.cat([data["user_id.lengths"], data["user_id.lengths"], data["words.lengths"]])
    return KeyedJaggedTensor(KEYS, joined_by_key(data, "values"), lengths=lengths)


def cut_elsewhere(data: Data) -> KeyedJaggedTensor:
    """Behind as many ids as another key has, which in the example is the same."""
    values, counts = joined_by_key(data, "values"), [data[f"{key}.lengths"].sum().item() for key in KEYS]
    parts = [values[: counts[0]], values[counts[2] : counts[2] + counts[1]], values[counts[0] + counts[1] :]]
    return KeyedJaggedTensor(KEYS, torch.cat(parts), lengths=joined_by_key(data, "lengths"))


def cut_by_a_choice(data: Data) -> KeyedJaggedTensor:
    """Behind as many ids as the first key has, unless its first sample has very many."""
    values, counts = joined_by_key(data, "values"), [data[f"{key}.lengths"].sum().item() for key in KEYS]
    both = torch.tensor([counts[0], counts[1]])
    first = both[int((data["user_id.lengths"][0] // 1000).clamp(max=1).item())].item()
    return KeyedJaggedTensor(
        KEYS, torch.cat([values[:first], values[first:]]), lengths=joined_by_key(data, "lengths")
    )


def lengths_limited(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, joined_by_key(data, "values"), lengths=joined_by_key(data, "lengths").clamp(max=5))


def weights_doubled(data: Data) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        KEYS,
        joined_by_key(data, "values"),
        joined_by_key(data, "weights") * 2,
        lengths=joined_by_key(data, "lengths"),
    )


SERVED = [
    joined, in_another_order, permuted, sent_to_a_device, lengths_as_int64, of_jagged_tensors, split_and_joined,
    of_each_key, of_dict,
]  # fmt: skip
REFUSED: dict[Callable[[Data], KeyedJaggedTensor], str] = {
    hashed: "makes the ids of the keys 'user_id', 'item_id', 'words' by aten.remainder.Scalar at .*, line",
    hashed_in_place: "makes the ids of the keys .* by aten.remainder_.Scalar at .*, line",
    turned: "gives a collection ids of key 'words' that are not those of one sample of the example",
    cut_elsewhere: "ids of key 'item_id' that are not those of one sample|in a way that fails for other numbers",
    cut_by_a_choice: "makes the ids of the keys .* by .* at .*, line|cannot be traced",
    lengths_limited: "by aten.clamp.default at .*, line|fails for the example at .*, line .*ids, and lengths that",
    weights_doubled: "makes the ids of the keys .* by aten.mul.Tensor at .*, line",
}


def data_of(samples: int, seed: int, most: int = 4, same: int | None = None) -> Data:
    """`same`: so many ids in each sample of all keys."""
    random = np.random.default_rng(seed)
    least, most = (0, most) if same is None else (same, same)
    keyed = ids(random, samples, *KEYS, least=least, most=most)
    result = {"price": numbers(random, samples, 2), "seen.lengths": torch.ones(samples, dtype=torch.int32)}
    for key in KEYS:
        result |= {f"{key}.values": keyed[key].values(), f"{key}.lengths": keyed[key].lengths()}
        result[f"{key}.weights"] = numbers(random, keyed[key].values().numel())
    return result


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


@pytest.mark.parametrize(
    ("make", "same"),
    one_in(4, [*((make, None) for make in SERVED), (joined, 1), (of_jagged_tensors, 3), (of_each_key, 1)]),
)
def test_a_kjt_made_of_values_and_lengths_is_served(
    tmp_path: Path, make: Callable[[Data], KeyedJaggedTensor], same: int | None
) -> None:
    """Also where an example has one id, or as many, in each sample, and other tensors have such numbers, too."""
    module = Making(make).eval()
    compare(export_model(module, tmp_path / "r", "m", EXACT, example=(data_of(6, 0, same=same),)), module)


@pytest.mark.parametrize("make", one_in(2, [weighted_and_split, weighted]))
def test_weights_of_each_key_are_those_of_its_feature(
    tmp_path: Path, make: Callable[[Data], KeyedJaggedTensor]
) -> None:
    module = Making(make, weighted=True).eval()
    compare(export_model(module, tmp_path / "r", "m", EXACT, example=(data_of(6, 0),)), module)


def test_a_key_with_the_lengths_of_another_key_is_served(tmp_path: Path) -> None:
    module = Making(of_another_key, weighted=False).eval()

    def data(samples: int, seed: int) -> Data:
        of_each = data_of(samples, seed)
        of_each["item_id.lengths"] = of_each["user_id.lengths"].clone()
        of_each["item_id.values"] = torch.arange(int(of_each["user_id.lengths"].sum())) % 10
        return of_each

    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=(data(6, 0),))
    with Engine.open(bundle) as engine:
        price = np.ones((2, 2), np.float32)
        (price_name,) = (dense_input.name for dense_input in engine.bundle.manifest.dense_part.inputs)  # type: ignore[union-attr]
        ids: dict[str, Any] = {"user_id": [[1, 2], [3]], "item_id": [[4, 5], [6]], "words": [[], [7]]}
        (scores,) = engine.score(ids, {price_name: price}).values()
        example = data(2, 1)
        for key, bags in ids.items():
            example[f"{key}.values"] = torch.tensor([value for bag in bags for value in bag])
            example[f"{key}.lengths"] = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
        example["price"] = torch.from_numpy(price)
        with torch.no_grad():
            np.testing.assert_allclose(scores, module(example).numpy(), atol=1e-6)
        with pytest.raises(InvalidRequest, match="expected as many ids as 'item_id' has in each sample"):
            engine.score({**ids, "item_id": [[4], [5, 6]]}, {price_name: price})


@pytest.mark.parametrize(
    ("is_small", "make"), one_in(2, [*((True, make) for make in REFUSED), (False, hashed), (False, lengths_limited)])
)
def test_changed_values_and_lengths_are_refused(
    tmp_path: Path, make: Callable[[Data], KeyedJaggedTensor], is_small: bool
) -> None:
    """Also where an example, whose ids are small and few, would not show it."""
    module = Making(make, weighted=make is weights_doubled).eval()
    data = data_of(6, 0, most=4 if is_small else 9)
    for key in KEYS if is_small else ():
        data[f"{key}.values"] %= 10
    if make is cut_elsewhere:
        data |= {f"words.{what}": data[f"user_id.{what}"].clone() for what in ("values", "lengths")}
    if make is turned and is_small:
        data["words.values"][:] = 3
    with pytest.raises(ModelError, match=f"^Making: .*({REFUSED[make]})"):
        export_model(module, tmp_path / "r", "m", EXACT, example=(data,))


class Some(nn.Module):
    """TorchEasyRec joins all features of its configuration; also weights of one, which no collection takes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences(ROWS)
        self.top = nn.Linear(DIM, 2)

    def forward(self, data: Data) -> Tensor:
        keys = ["visited", "unused", "seen", "target"]
        weights = [data["seen.weights"] if key == "seen" else torch.ones_like(data[f"{key}.values"]) for key in keys]
        keyed = KeyedJaggedTensor(
            keys,
            joined_by_key(data, "values", keys),
            torch.cat(weights).float(),
            lengths=joined_by_key(data, "lengths", keys),
        )
        return self.top(self.rows(keyed)["seen"].to_padded_dense(4).sum(1))  # type: ignore[no-any-return]


def test_keys_without_a_lookup_are_not_requested(tmp_path: Path) -> None:
    def of(samples: int, seed: int) -> Data:
        random, result = np.random.default_rng(seed), Data()
        for key in ("visited", "unused", "seen", "target"):
            lengths = torch.from_numpy(random.integers(0, 5, samples, dtype=np.int32))
            values = torch.from_numpy(random.integers(0, 30, int(lengths.sum())))
            result |= {f"{key}.values": values, f"{key}.lengths": lengths}
        return {**result, "seen.weights": numbers(random, len(result["seen.values"]))}

    module, example = Some().eval(), of(6, 0)
    example |= {f"visited.{what}": example[f"seen.{what}"].clone() for what in ("values", "lengths")}
    path = export_model(module, tmp_path / "r", "m", EXACT, example=(example,))
    with Engine.open(path) as engine:
        for samples in (1, 2, 30):
            data = of(samples, samples)
            with torch.no_grad():
                assert_close(
                    engine.score(columns(data, "seen", "target", "visited")), {"scores": module(data).numpy()}
                )


def columns(data: Data, *keys: str) -> dict[str, dict[str, Tensor]]:
    return {key: {what: data[f"{key}.{what}"] for what in ("values", "lengths")} for key in keys}


class Prices(Making):
    """A number for each id of a key, with the lengths of that key as the KJT has them."""

    def forward(self, data: Data) -> Tensor:
        prices = JaggedTensor(data["item_id.weights"], lengths=self.make(data)["item_id"].lengths())
        return super().forward(data) + prices.to_padded_dense(9).sum(1, keepdim=True)  # type: ignore[no-any-return]


def test_numbers_with_the_lengths_of_a_made_key_are_served(tmp_path: Path) -> None:
    module = Prices(joined).eval()
    path = export_model(module, tmp_path / "r", "m", EXACT, example=(data_of(6, 0),))
    with Engine.open(path) as engine:
        for samples in (1, 3, 40):
            data = data_of(samples, samples, most=9)
            dense = {f"data.{name}": data[name].numpy() for name in ("price", "item_id.weights")}
            with torch.no_grad():
                assert_close(engine.score(columns(data, *KEYS), dense), {"scores": module(data).numpy()})


class Twice(nn.Module):
    """One key is looked up for two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED[:1])
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, data: Data) -> Tensor:
        pooled = [
            self.bags(KeyedJaggedTensor(["user_id"], data[f"{key}.values"], lengths=data[f"{key}.lengths"])).values()
            for key in ("user_id", "words")
        ]
        return self.top(torch.cat(pooled, 1))  # type: ignore[no-any-return]


class Counts(Making):
    """How long a list is that nothing looks up, and of which nothing else is used."""

    def forward(self, data: Data) -> Tensor:
        counted = JaggedTensor(data["other.values"], lengths=data["other.lengths"])
        return super().forward(data) * counted.lengths().unsqueeze(1)  # type: ignore[no-any-return]


class CountsInPlace(Making):
    """The same, written into a tensor."""

    def forward(self, data: Data) -> Tensor:
        counted = JaggedTensor(data["other.values"], lengths=data["other.lengths"])
        counts = torch.zeros_like(data["price"])
        counts[:, 0] = counted.lengths()
        return super().forward(data) + counts


class Unpaired(Making):
    """Numbers for ids of a key of a KJT of the example, of which a request brings no tensor of lengths."""

    def forward(self, data: Any) -> Tensor:
        keyed = data["keyed"]
        prices = JaggedTensor(data["item_id.weights"], lengths=keyed["item_id"].lengths()).to_padded_dense(9)
        return self.top(self.bags(keyed).values()) + prices.sum(1, keepdim=True)  # type: ignore[no-any-return]


class ChangesLater(Making):
    """Lengths are changed after they were looked up by."""

    def forward(self, data: Data) -> Tensor:
        keyed = self.make(data)
        answer = self.top(self.bags(keyed).values())
        keyed.lengths().clamp_(max=1)
        return answer + data["price"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "said"),
    one_in(
        2,
        [
            (
                Twice(),
                "Twice: 'data.user_id.values' and 'data.words.values' have ids of one key, 'user_id', and a request",
            ),
            (
                Counts(joined),
                "Counts: uses how many numbers 'data.other.values' has in each sample, and none of these",
            ),
            (
                CountsInPlace(joined),
                "CountsInPlace: uses how many numbers 'data.other.values' has in each sample, and none",
            ),
            (
                Unpaired(joined),
                "Unpaired: makes a JaggedTensor of 'data.item_id.weights' at .*, line .*, and its lengths",
            ),
            (
                ChangesLater(joined),
                "ChangesLater: its forward changes lengths in place that a collection got at .*, line",
            ),
        ],
    ),
)
def test_inputs_that_requests_lack_are_refused_by_name(tmp_path: Path, module: nn.Module, said: str) -> None:
    """Though the example has as many in each sample, or the same."""
    data: dict[str, Any] = data_of(6, 0)
    if isinstance(module, Unpaired):
        data["keyed"] = joined(data)
    data["other.lengths"] = data["user_id.lengths"].clone()
    data["other.values"] = torch.arange(int(data["other.lengths"].sum()))
    with pytest.raises(ModelError, match=f"^{said}"):
        export_model(module.eval(), tmp_path / "r", "m", EXACT, example=(data,))


def test_one_tensor_in_two_places_of_an_example_is_refused(tmp_path: Path) -> None:
    """Requests bring two, and nobody could tell which of them is used where."""
    data = data_of(6, 0)
    data["label"] = data["words.lengths"]
    with pytest.raises(ModelError, match=r"^example: 'data.words.lengths' and 'data.label' are one tensor, and"):
        export_model(Making(joined).eval(), tmp_path / "r", "m", EXACT, example=(data,))
