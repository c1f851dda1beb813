"""The signature of a model: which of its arguments are ids of keys, dense inputs, or constants of the example."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from export.capture.bags import Bag, Bags, RequestKjt, bag_of, bags_of, kjt_of_bags, with_dtypes_of
from export.capture.example import Call
from export.capture.tensor_provenance import KjtParts
from export.capture.value_checks import Checks
from serving.bundle.scores import JaggedInput, JaggedKind


@dataclass(frozen=True, slots=True)
class IdColumns:
    """The columns with the ids of a key, in a tensor of the example with a row for each sample.

    Attributes:
        path: of the tensor. Empty if the request has the key itself.
        columns: their indices.
    """

    path: str
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The ids, dense inputs and constants in the arguments of a model.

    Attributes:
        call: the example.
        samples: the number of samples in the example.
        keyed: the KJTs of the example, by path.
        jagged: the key of each JaggedTensor of the example, by path; the path itself if no collection gets it.
        parts: the tensors of the example from which the forward makes KJTs.
        by_sample: the tensors with a row for each sample, by path.
        fixed: the keys that the forward makes from such tensors, with the number of ids of each sample.
        id_columns: the columns with the ids of each of these keys. Empty before the trace.
        clocks: the lines of the model's code that read a clock.
        unkeyed: keys and JaggedTensors that no collection looks up, except keys of several KJTs.
        numbers: those of `unkeyed` with a number for each id of a key, and that key. Empty before the trace.
        first: for a key that must have as many ids in each sample as another key, that key. Empty before the trace.
        checks: the outcomes of the checks in the model's code.
        weights: by path of a JaggedTensor with the weights of a key, that key.
    """

    call: Call
    samples: int
    keyed: Mapping[str, KeyedJaggedTensor]
    jagged: Mapping[str, str]
    parts: Sequence[KjtParts]
    by_sample: Mapping[str, Tensor]
    fixed: Mapping[str, int]
    id_columns: Mapping[str, IdColumns]
    clocks: Sequence[str]
    unkeyed: Sequence[str] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    checks: Checks = field(default_factory=Checks)
    weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def constants(self) -> list[str]:
        """The paths of the leaves that stay as in the example."""
        paths_of_parts = (path for part in self.parts for path in part.paths)
        replaced = {*self.keyed, *self.jagged, *self.weights, *self.by_sample, *paths_of_parts}
        return [path for path in self.call.leaves if path not in replaced]

    def key_of(self, jagged: JaggedInput, key_of_feature: Mapping[str, str]) -> str:
        """The key whose ids a jagged input has a row for."""
        if jagged.kind is JaggedKind.ROWS:
            return key_of_feature[jagged.name]
        return self.numbers.get(jagged.name, jagged.name)

    def bags(self) -> dict[str, Bag]:
        """The ids of the example, and its numbers of ids, by key."""
        leaves = self.call.leaves
        bags: dict[str, Bag] = {}
        for kjt in self.keyed.values():
            bags |= bags_of(kjt)
        bags |= {key: bag_of(leaves[path]) for path, key in self.jagged.items()}
        for part in self.parts:
            weights = None if part.weights is None else leaves[part.weights]
            bags |= bags_of(KeyedJaggedTensor(list(part.keys), leaves[part.values], weights, part.lengths_in(leaves)))
        for path, key in self.weights.items():
            bag = bags[key]
            bags[key] = Bag(bag.ids, bag.lengths, leaves[path].values())
        for key, source in self.id_columns.items():
            ids = self.by_sample[source.path].reshape(self.samples, -1)[:, list(source.columns)]
            bags[key] = Bag(ids.reshape(-1), torch.full((self.samples,), len(source.columns)))
        return bags

    def called(
        self, samples: int, bags: Bags, by_sample: Mapping[str, Tensor], *, as_request_kjts: bool = False
    ) -> Call:
        """The call of the model with other ids and dense inputs.

        Args:
            samples: B.
            bags: ids by key. Keys without a bag have no ids.
            by_sample: tensors with a row for each sample, by path.
            as_request_kjts: whether KJTs are `RequestKjt`s, which can tell whether their ids are unchanged.
        """
        leaves: dict[str, Any] = {path: tensor for path, tensor in by_sample.items() if path in self.by_sample}
        for path, kjt in self.keyed.items():
            bags_of_kjt = {key: with_dtypes_of(kjt, bags.get(key), samples) for key in keys_of(kjt)}
            leaves[path] = RequestKjt(bags_of_kjt) if as_request_kjts else kjt_of_bags(bags_of_kjt)
        for path, key in self.jagged.items():
            bag = with_dtypes_of(self.call.leaves[path], bags.get(key), samples)
            leaves[path] = JaggedTensor(bag.ids, weights=bag.weights, lengths=bag.lengths)
        for path, key in self.weights.items():
            example, bag = self.call.leaves[path], bags[key]
            assert bag.weights is not None  # noqa: S101  the key has weights in the example
            leaves[path] = JaggedTensor(
                bag.weights.to(example.values().dtype), lengths=bag.lengths.to(example.lengths().dtype)
            )
        for part in self.parts:
            self._add_part(part, [bags[key] for key in part.keys], leaves)
        for path in {source.path for source in self.id_columns.values()}:
            leaves[path] = self.tensor_of(path, bags)
        return self.call.with_leaves(leaves)

    def _add_part(self, part: KjtParts, bags: Sequence[Bag], leaves: dict[str, Any]) -> None:
        """Add the tensors from which the forward makes a KJT."""
        example = self.call.leaves
        leaves[part.values] = torch.cat([bag.ids for bag in bags]).to(example[part.values].dtype)
        # If several keys share a tensor of lengths, it has the lengths of the first key.
        if part.lengths not in leaves:
            leaves[part.lengths] = part.lengths_like(example[part.lengths], [bag.lengths for bag in bags])
        if part.weights is not None:
            leaves[part.weights] = torch.cat([bag.weights for bag in bags if bag.weights is not None])

    def tensor_of(self, path: str, bags: Bags) -> Tensor:
        """The tensor at `path`, from the ids of its keys. Its other columns are 0."""
        example = self.by_sample[path]
        columns = {key: source.columns for key, source in self.id_columns.items() if source.path == path}
        blocks = [bags[key].ids.view(-1, len(numbers)) for key, numbers in columns.items()]
        block_of = {
            column: index for index, column in enumerate(column for group in columns.values() for column in group)
        }
        width = example[:1].numel()
        if len(block_of) < width:
            blocks.append(torch.zeros_like(blocks[0][:, :1]))
        joined = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
        order = [block_of.get(column, len(block_of)) for column in range(width)]
        if order != list(range(len(block_of))):
            joined = joined[:, order]
        return joined.to(example.dtype).view(-1, *example.shape[1:])


def keys_of(kjt: KeyedJaggedTensor) -> list[str]:
    """The keys of a KJT, typed."""
    keys: list[str] = kjt.keys()
    return keys
