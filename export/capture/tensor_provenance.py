"""Find the tensors of an example from which a forward makes KJTs and JaggedTensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from torchrec import JaggedTensor, KeyedJaggedTensor

from export.capture.bags import bags_of
from export.capture.model_files import patched
from export.trained.source_location import current_line

# By tensor: the paths of the example's tensors from which it is computed.
_Sources = MutableMapping[Tensor, frozenset[str]]


@dataclass(frozen=True, slots=True)
class KjtParts:
    """The tensors of the example from which the forward makes a KJT.

    Attributes:
        keys: of the KJT.
        values: the path of the ids.
        lengths: the path of the lengths.
        weights: the path of the weights; None if the KJT has none.
        has_offsets: whether the tensor at `lengths` has offsets, from which the forward computes lengths.
    """

    keys: Sequence[str]
    values: str
    lengths: str
    weights: str | None = None
    has_offsets: bool = False

    @property
    def paths(self) -> list[str]:
        """The paths of all its tensors."""
        return [path for path in (self.values, self.lengths, self.weights) if path is not None]

    def lengths_in(self, leaves: Mapping[str, Any]) -> Tensor:
        """The lengths of its keys in an example, one key after another; integers [keys · B]."""
        tensor: Tensor = leaves[self.lengths]
        return tensor.diff() if self.has_offsets else tensor.reshape(-1)

    def lengths_like(self, example: Tensor, lengths_of_keys: Sequence[Tensor]) -> Tensor:
        """The lengths of its keys, [B] each, in the form of the example: a tensor of lengths or of offsets."""
        parts = [lengths.to(example.dtype) for lengths in lengths_of_keys]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.has_offsets:
            offsets: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(joined)
            return offsets
        return joined.view(-1 if example.dim() == 1 else (len(self.keys), -1))


class TensorProvenance:
    """Records, while a forward runs, from which tensors of an example other tensors are computed.

    Args:
        leaves: the tensors of the example, by path.

    Attributes:
        pairs: the JaggedTensors whose values and lengths are tensors of the example. Their key is the path of the
            values.
        unpaired: the path of the values, and the line, of each JaggedTensor whose lengths are no tensor of the
            example.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.pairs: list[KjtParts] = []
        self.unpaired: dict[str, str] = {}
        self._kjts: list[KeyedJaggedTensor] = []
        self._leaves = leaves
        self._sources: _Sources = WeakTensorKeyDictionary()
        for path, leaf in leaves.items():
            self._sources[leaf] = frozenset([path])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In the block, record sources and JaggedTensors."""
        jagged_init, kjt_init = JaggedTensor.__init__, KeyedJaggedTensor.__init__

        def init_jagged(jagged: JaggedTensor, *args: Any, **kwargs: Any) -> None:
            jagged_init(jagged, *args, **kwargs)
            values, lengths = self._path_of(jagged._values), jagged._lengths
            if values and lengths is not None and jagged._weights is None:
                path = self._path_of(lengths) or self._best_match(values, lengths, lengths, [values])
                if path and torch.equal(self._leaves[path].long(), lengths.long()):
                    self.pairs.append(KjtParts((values,), values, path))
                else:
                    self.unpaired.setdefault(values, current_line())

        def init_kjt(kjt: KeyedJaggedTensor, *args: Any, **kwargs: Any) -> None:
            kjt_init(kjt, *args, **kwargs)
            if type(kjt) is KeyedJaggedTensor and kjt._lengths is not None:
                self._kjts.append(kjt)

        with (
            patched(JaggedTensor, __init__=init_jagged),
            patched(KeyedJaggedTensor, __init__=init_kjt),
            _RecordSources(self._sources),
        ):
            yield

    def parts_of(self, kjt: KeyedJaggedTensor) -> list[KjtParts]:
        """The tensors of the example that a KJT is made of, for all its keys or for each key, if they are known.

        The KJT may be split off another one that the forward made. Whether it has the numbers of these tensors in
        every request is checked later, in the graph (export/capture/id_provenance.py).
        """
        parts = self._parts_of(kjt)
        for other in self._kjts:
            if int(other.lengths().sum()) != len(other.values()):
                continue
            missing = {*kjt.keys()} - {key for part in parts for key in part.keys}
            if missing & {*other.keys()}:
                parts += [part for part in self._parts_of(other) if missing & {*part.keys}]
        return parts

    def _parts_of(self, kjt: KeyedJaggedTensor) -> list[KjtParts]:
        weights = kjt.weights_or_none()
        values, lengths = self._path_of(kjt.values()), self._path_of(kjt.lengths())
        offsets = None if lengths is not None else self._offsets_of(kjt.lengths(), kjt.lengths())
        if values is not None and (lengths or offsets) is not None:
            weights_path = None if weights is None else self._path_of(weights)
            return [
                KjtParts(
                    tuple(kjt.keys()), values, lengths or offsets or "", weights_path, has_offsets=lengths is None
                )
            ]
        parts: list[KjtParts] = []
        for key, bag in bags_of(kjt).items():
            used = {path for part in parts for path in part.paths}
            values = self._best_match(key, kjt.values(), bag.ids, used)
            if values is None:
                continue
            lengths = self._lengths_of_key(values, kjt.lengths(), bag.lengths, used, parts)
            if lengths:
                has_offsets = self._leaves[lengths].shape != bag.lengths.shape
                weights_path = self._weights_of_key(values, weights, bag.weights, used)
                parts.append(KjtParts((key,), values, lengths, weights_path, has_offsets))
        return parts

    def _lengths_of_key(
        self, values: str, whole: Tensor, lengths: Tensor, used: set[str], parts: Sequence[KjtParts]
    ) -> str | None:
        """The path of the tensor with the lengths or offsets of a key, or None.

        Several keys may share a tensor of lengths, so the tensor of another key is taken if no other one matches.
        """
        shared = {part.lengths for part in parts}
        for excluded in (used | {values}, (used - shared) | {values}):
            path = self._best_match(values, whole, lengths, excluded)
            if path and torch.equal(self._leaves[path].long(), lengths.long()):
                return path
            if path := self._offsets_of(whole, lengths, excluded):
                return path
        return None

    def _offsets_of(self, whole: Tensor, lengths: Tensor, excluded: Iterable[str] = ()) -> str | None:
        """The path of the tensor with the offsets of some lengths, among the sources of all lengths; or None."""
        for path in sorted(self._sources.get(whole, frozenset()) - {*excluded}):
            leaf = self._leaves[path]
            has_shape = leaf.dim() == 1 and len(leaf) == lengths.numel() + 1 and not leaf.dtype.is_floating_point
            if has_shape and leaf[0] == 0 and torch.equal(leaf.long().diff(), lengths.long().reshape(-1)):
                return path
        return None

    def _weights_of_key(
        self, name: str, whole: Tensor | None, part: Tensor | None, excluded: Iterable[str]
    ) -> str | None:
        """The path of the weights of a key; None without weights, or if the forward makes them: 1 for each id."""
        if whole is None or part is None:
            return None
        path = self._best_match(name, whole, part, excluded)
        is_made = path is not None and part.eq(1).all() and not self._leaves[path].eq(1).all()
        return None if is_made else path

    def _path_of(self, tensor: Tensor | None) -> str | None:
        if tensor is None:
            return None
        for path, leaf in self._leaves.items():
            if leaf.numel() == tensor.numel() > 0 and leaf.data_ptr() == tensor.data_ptr():
                return path
        return None

    def _best_match(self, name: str, whole: Tensor, part: Tensor, excluded: Iterable[str]) -> str | None:
        """The path of the source of `whole` that is most like `part` among those of the same shape, or None.

        A source with the same numbers is preferred, then the source whose path is most like `name`.
        """
        has_same_numbers = {
            path: torch.equal(self._leaves[path].to(part.dtype), part)
            for path in sorted(self._sources.get(whole, frozenset()) - {*excluded})
            if self._leaves[path].shape == part.shape
            if self._leaves[path].is_floating_point() == part.is_floating_point()
        }
        rank = {path: (same, SequenceMatcher(a=name, b=path).ratio()) for path, same in has_same_numbers.items()}
        return max(rank, key=rank.__getitem__, default=None)


class _RecordSources(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the block, record the sources of each tensor that an operator returns.

    Args:
        sources: gets the sources of each tensor.
    """

    def __init__(self, sources: _Sources) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        paths = frozenset[str]().union(*(self._sources.get(argument, frozenset()) for argument in arguments))
        if paths:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._sources[leaf] = paths | self._sources.get(leaf, frozenset())
        return result
