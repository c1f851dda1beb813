"""Which tensors of an example a forward makes its KJTs and JaggedTensors of."""

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

# The paths of the tensors that a tensor is made of.
_MadeOf = MutableMapping[Tensor, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Parts:
    """A KJT that the forward makes of its parts, each a tensor of the example.

    Attributes:
        keys: of the KJT.
        values, lengths: the paths of the tensors.
        weights: likewise; None: it has none.
        has_offsets: whether `lengths` is the path of offsets, from which the forward makes lengths.
    """

    keys: Sequence[str]
    values: str
    lengths: str
    weights: str | None = None
    has_offsets: bool = False

    @property
    def paths(self) -> list[str]:
        """The paths of all its tensors."""
        return [each for each in (self.values, self.lengths, self.weights) if each is not None]

    def lengths_in(self, leaves: Mapping[str, Any]) -> Tensor:
        """The lengths of its keys in an example, one key after another; integers [keys · B]."""
        found: Tensor = leaves[self.lengths]
        return found.diff() if self.has_offsets else found.reshape(-1)

    def as_in(self, old: Tensor, of_keys: Sequence[Tensor]) -> Tensor:
        """Lengths of its keys, [B] each, as the tensor of the example that has them, `old`, would have them."""
        own = [each.to(old.dtype) for each in of_keys]
        lengths = own[0] if len(own) == 1 else torch.cat(own)
        if self.has_offsets:
            offsets: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
            return offsets
        return lengths.view(-1 if old.dim() == 1 else (len(self.keys), -1))


class TensorProvenance:
    """Of which tensors of an example others are made, while a forward runs.

    Args:
        leaves: the tensors, by path.

    Attributes:
        pairs: the JaggedTensors that are made of two of them, each under the path of its values.
        unpaired: those that are made of one, and of lengths that are none: the path of the values, and the line.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.pairs: list[Parts] = []
        self.unpaired: dict[str, str] = {}
        self._kjts: list[KeyedJaggedTensor] = []
        self._leaves = leaves
        self._of: _MadeOf = WeakTensorKeyDictionary()
        for path, each in leaves.items():
            self._of[each] = frozenset([path])

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In the block, note them."""
        init = JaggedTensor.__init__

        def made(jagged: JaggedTensor, *args: Any, **kwargs: Any) -> None:
            init(jagged, *args, **kwargs)
            values, lengths = self._path_of(jagged._values), jagged._lengths
            if values and lengths is not None and jagged._weights is None:
                path = self._path_of(lengths) or self._nearest(values, lengths, lengths, [values])
                if path and torch.equal(self._leaves[path].long(), lengths.long()):
                    self.pairs.append(Parts((values,), values, path))
                else:
                    self.unpaired.setdefault(values, current_line())

        of_keys = KeyedJaggedTensor.__init__

        def keyed(kjt: KeyedJaggedTensor, *args: Any, **kwargs: Any) -> None:
            of_keys(kjt, *args, **kwargs)
            if type(kjt) is KeyedJaggedTensor and kjt._lengths is not None:
                self._kjts.append(kjt)

        with patched(JaggedTensor, __init__=made), patched(KeyedJaggedTensor, __init__=keyed), _Noting(self._of):
            yield

    def parts_of(self, kjt: KeyedJaggedTensor) -> list[Parts]:
        """The tensors of the example that a KJT is made of: of all its keys, or of each key; those that can be told.

        It may be cut out of another that the forward made. Whether it has their numbers for any request, its graph
        says (export/capture/id_provenance.py).
        """
        found = self._parts_of(kjt)
        for other in [each for each in self._kjts if int(each.lengths().sum()) == len(each.values())]:
            missing = {*kjt.keys()} - {key for each in found for key in each.keys}
            if missing & {*other.keys()}:
                found += [each for each in self._parts_of(other) if missing & {*each.keys}]
        return found

    def _parts_of(self, kjt: KeyedJaggedTensor) -> list[Parts]:
        weights = kjt.weights_or_none()
        values, lengths = self._path_of(kjt.values()), self._path_of(kjt.lengths())
        offsets = None if lengths is not None else self._offsets_of(kjt.lengths(), kjt.lengths())
        if values is not None and (of_all := lengths or offsets) is not None:
            of_weights = None if weights is None else self._path_of(weights)
            return [Parts(tuple(kjt.keys()), values, of_all, of_weights, has_offsets=lengths is None)]
        found: list[Parts] = []
        for key, bag in bags_of(kjt).items():
            taken = {path for each in found for path in each.paths}
            own = self._nearest(key, kjt.values(), bag.ids, taken)
            if own is None:
                continue
            # Several keys may have the lengths of one tensor.
            shared = {each.lengths for each in found}
            for others in (taken, taken - shared):
                of_lengths = self._nearest(own, kjt.lengths(), bag.lengths, {*others, own})
                if of_lengths and torch.equal(self._leaves[of_lengths].long(), bag.lengths.long()):
                    break
                of_lengths = self._offsets_of(kjt.lengths(), bag.lengths, {*others, own})
                if of_lengths:
                    break
            if of_lengths:
                has_offsets = self._leaves[of_lengths].shape != bag.lengths.shape
                of_weights = self._weights(own, weights, bag.weights, taken)
                found.append(Parts((key,), own, of_lengths, of_weights, has_offsets))
        return found

    def _offsets_of(self, whole: Tensor, lengths: Tensor, taken: Iterable[str] = ()) -> str | None:
        """The tensor that has the offsets of some lengths, of those that all lengths are made of."""
        for path in sorted(self._of.get(whole, frozenset()) - {*taken}):
            leaf = self._leaves[path]
            is_alike = leaf.dim() == 1 and len(leaf) == lengths.numel() + 1 and not leaf.dtype.is_floating_point
            if is_alike and leaf[0] == 0 and torch.equal(leaf.long().diff(), lengths.long().reshape(-1)):
                return path
        return None

    def _weights(self, name: str, whole: Tensor | None, part: Tensor | None, taken: Iterable[str]) -> str | None:
        """The weights of a key. None: there are none, or the forward makes them, 1 for each id."""
        if whole is None or part is None:
            return None
        found = self._nearest(name, whole, part, taken)
        is_made = found is not None and part.eq(1).all() and not self._leaves[found].eq(1).all()
        return None if is_made else found

    def _path_of(self, tensor: Tensor | None) -> str | None:
        same = (
            path
            for path, each in self._leaves.items()
            if tensor is not None and each.numel() == tensor.numel() > 0 and each.data_ptr() == tensor.data_ptr()
        )
        return next(same, None)

    def _nearest(self, name: str, whole: Tensor, part: Tensor, taken: Iterable[str]) -> str | None:
        """Of the tensors that a whole is made of and that are as long as a part: one that has its numbers, if there
        is one; of several, the one that is called most alike.
        """
        alike = {
            path: torch.equal(self._leaves[path].to(part.dtype), part)
            for path in sorted(self._of.get(whole, frozenset()) - {*taken})
            if self._leaves[path].shape == part.shape
            if self._leaves[path].is_floating_point() == part.is_floating_point()
        }
        rank = {path: (is_same, SequenceMatcher(a=name, b=path).ratio()) for path, is_same in alike.items()}
        return max(rank, key=rank.__getitem__, default=None)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the block, note for each tensor that an operator answers, of what it is made.

    Args:
        of: what tensors are made of, which is added to.
    """

    def __init__(self, of: _MadeOf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if found := frozenset[str]().union(*(self._of.get(each, frozenset()) for each in given)):
            for each in tree_leaves(answer):
                if isinstance(each, Tensor):
                    self._of[each] = found | self._of.get(each, frozenset())
        return answer
