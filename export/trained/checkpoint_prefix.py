"""Find the keys of a model in a checkpoint: all of them under one prefix, as load_state_dict(strict=True) takes them.

Trainers save a model in dicts (`state_dict`, `model`), in other modules (`model.`), and in wrappers, which put a name
of their own between two modules (`_orig_mod`, `module`). So a checkpoint may hold several models: an average, a
teacher, another tower. Only its keys tell them apart. A missing key is never taken from another prefix. If two
prefixes fit, the checkpoint is refused.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from export.errors import CheckpointError

# Names that a wrapper puts before those of the module in it.
WRAPPERS = frozenset(
    {
        "module",  # DistributedDataParallel, DataParallel, AveragedModel, DeepSpeed
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",  # FullyShardedDataParallel
        "_fpw_module",  # the same, of fairscale
        "_checkpoint_wrapped_module",  # checkpoint_wrapper, offload_wrapper
        "_dmp_wrapped_module",  # torchrec's DistributedModelParallel
        "_forward_module",  # Lightning's Fabric
    }
)
# What trainers call the model itself when they save others with it.
_MODEL = WRAPPERS | {"model", "net", "network", "state_dict", "model_state_dict", "model_state"}
# Keys that a message lists.
_LISTED = 4
# A buffer of batch normalization that state dicts of its version 1 do not have.
COUNTER, _COUNTER_VERSION = "num_batches_tracked", 2


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """The keys that the state dict of a model has.

    Attributes:
        needed: keys that a checkpoint must have, each with its description for messages, such as "table 'user'".
        all: all keys of the model.
        twins: all keys of a tensor, by each of its keys. A checkpoint needs only one of them.
        is_whole: whether unexpected keys of the model's modules are refused. An export of tables alone ignores them.
        defaults: the counters of batch normalization, which state dicts of its version 1 do not have.
        ignored: beginnings of keys that are never unexpected.
        narrow: the dtype of tensors that the model has in fewer bits than float32.
    """

    needed: Mapping[str, str]
    all: Collection[str]
    twins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_whole: bool = False
    defaults: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    narrow: Mapping[str, torch.dtype] = field(default_factory=dict)

    def names(self, key: str) -> tuple[str, ...]:
        """`key` and its twins."""
        return (key, *self.twins.get(key, ()))

    def saved_as(self, key: str, keys: Collection[str]) -> str | None:
        """The first of `key` and its twins that is in `keys`, or None."""
        return next((name for name in self.names(key) if name in keys), None)


class Saved(NamedTuple):
    """What a checkpoint has.

    Attributes:
        source: the checkpoint, for messages.
        keys: its keys.
        versions: the versions of modules, by their paths in the checkpoint. None: no missing key has a default.
    """

    source: str
    keys: Collection[str]
    versions: Mapping[str, int] | None = None

    def has_default(self, key: str, model: ModelKeys, matched: Mapping[str, str]) -> bool:
        """Whether load_state_dict gives a missing weight its default: the module has no version, or an older one.

        Args:
            key: the model's key of the weight.
            model: the keys of the model.
            matched: the checkpoint's key of each of the model's keys.
        """
        if self.versions is None or key not in model.defaults:
            return False
        # The counter's module has another buffer, whose key in the checkpoint shows the module's path there.
        means = (matched.get(f"{name.removesuffix(COUNTER)}running_mean") for name in model.names(key))
        return all(self._version_of(mean.rpartition(".")[0]) < _COUNTER_VERSION for mean in means if mean is not None)

    def _version_of(self, path: str) -> int:
        # Hooks of wrappers take the wrapper's name out of keys, and leave it in the paths of versions.
        versions = (version for other, version in (self.versions or {}).items() if _bare(other) == _bare(path))
        return max(versions, default=0)


@dataclass(frozen=True, slots=True)
class MatchedKeys:
    """The keys of a checkpoint that belong to a model.

    Attributes:
        prefix: the prefix of its keys, "" or with a dot at its end.
        keys: the checkpoint's key of each of the model's keys that it has.
        defaults: keys that the checkpoint lacks and load_state_dict fills in.
        unused: the number of other tensors in the checkpoint.
    """

    prefix: str
    keys: Mapping[str, str]
    defaults: tuple[str, ...]
    unused: int


class _Node:
    """A tree of keys by their names. `key` is the key that ends at this node, if there is one."""

    __slots__ = ("children", "key")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.key: str | None = None

    @classmethod
    def of(cls, keys: Iterable[str]) -> "_Node":
        root = cls()
        for key in keys:
            node = root
            for name in key.split("."):
                node = node.children.setdefault(name, cls())
            node.key = key
        return root

    @property
    def wrapped(self) -> "_Node | None":
        """The node in the only wrapper here, or None if there is not exactly one."""
        inner = [child for name, child in self.children.items() if name in WRAPPERS]
        return inner[0] if len(inner) == 1 else None

    def all(self) -> "Iterator[tuple[tuple[str, ...], _Node]]":
        """This node and all nodes below it, each with its path from this one."""
        stack: list[tuple[tuple[str, ...], _Node]] = [((), self)]
        while stack:
            path, node = stack.pop()
            yield path, node
            stack += [((*path, name), child) for name, child in node.children.items()]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prefix under which a checkpoint has keys of a model.

    Attributes:
        path: the names of the prefix.
        node: the checkpoint's keys under the prefix.
        keys: the checkpoint's key of each of the model's keys that it has.
        missing: needed keys that it lacks.
        defaults: needed keys that it lacks and load_state_dict fills in.
    """

    path: tuple[str, ...]
    node: _Node
    keys: Mapping[str, str]
    missing: tuple[str, ...]
    defaults: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        return "".join(f"{name}." for name in self.path)

    def order(self) -> tuple[int, int, tuple[str, ...]]:
        """A key to sort candidates by: fewest missing keys first, then shortest prefix."""
        return len(self.missing), len(self.path), self.path


def match_keys(saved: Saved, model: ModelKeys, prefix: str | None = None) -> MatchedKeys:
    """Find the prefix under which a checkpoint has all keys of a model.

    Args:
        saved: the checkpoint.
        model: the keys to find.
        prefix: the prefix to take. None: the only one that fits.

    Raises:
        CheckpointError: no prefix fits, or several do; or the modules of the model have other keys there.
    """
    root = _Node.of(saved.keys)
    candidates = _candidates(saved, root, model)
    chosen = _only(saved, candidates, model) if prefix is None else _named(saved, root, model, prefix)
    if chosen.missing:
        alternatives = [
            candidate
            for candidate in candidates
            if candidate.path[: len(chosen.path)] != chosen.path or not candidate.missing
        ]
        raise _missing(saved, chosen, alternatives, model)
    if unexpected := _unexpected(chosen, model):
        raise CheckpointError(
            f"{saved.source}: unexpected keys under {chosen.prefix!r}: {_listed(unexpected)}: the model does not "
            "have them, or has them already: expected the keys of its state dict, as load_state_dict(strict=True) "
            "does: build the model as it was trained, or save it without them"
        )
    used = {chosen.keys[name] for key in model.needed if (name := model.saved_as(key, chosen.keys)) is not None}
    unused = len(saved.keys) - len(used | {*chosen.keys.values()})
    return MatchedKeys(chosen.prefix, chosen.keys, chosen.defaults, unused)


def _candidates(saved: Saved, root: _Node, model: ModelKeys) -> list[_Candidate]:
    """All prefixes with a needed key, ordered by their missing keys. Of prefixes with the same keys, the longest."""
    by_keys: dict[frozenset[tuple[str, str]], _Candidate] = {}
    model_root = _root_of(model)
    for path, node in root.all():
        candidate = _candidate(saved, path, node, model_root, model)
        needed = frozenset((name, candidate.keys[name]) for name in _needed_in(candidate, model))
        if needed and (needed not in by_keys or len(path) > len(by_keys[needed].path)):
            by_keys[needed] = candidate
    return sorted(by_keys.values(), key=_Candidate.order)


def _root_of(model: ModelKeys) -> _Node:
    return _Node.of(dict.fromkeys((*model.needed, *model.all)))


def _candidate(saved: Saved, path: tuple[str, ...], node: _Node, model_root: _Node, model: ModelKeys) -> _Candidate:
    keys: dict[str, str] = {}
    _match(model_root, node, keys)
    lacking = [key for key in model.needed if model.saved_as(key, keys) is None]
    defaults = tuple(key for key in lacking if saved.has_default(key, model, keys))
    return _Candidate(path, node, keys, tuple(key for key in lacking if key not in defaults), defaults)


def _match(model: _Node, node: _Node, keys: dict[str, str]) -> None:
    """Add to `keys` the keys that `node` and `model` share. A wrapper that only one of them has is skipped."""
    if model.key is not None and node.key is not None:
        keys[model.key] = node.key
    if common := model.children.keys() & node.children.keys():
        for name in common:
            _match(model.children[name], node.children[name], keys)
    elif model.children and node.wrapped is not None:
        _match(model, node.wrapped, keys)
    elif model.wrapped is not None and node.children:
        _match(model.wrapped, node, keys)


def _needed_in(candidate: _Candidate, model: ModelKeys) -> list[str]:
    """The keys of needed tensors that a candidate has, by any of their names."""
    names = dict.fromkeys(name for key in model.needed for name in model.names(key))
    return [name for name in names if name in candidate.keys]


def _named(saved: Saved, root: _Node, model: ModelKeys, prefix: str) -> _Candidate:
    """The candidate under a prefix that was chosen."""
    path, node = tuple(filter(None, prefix.split("."))), root
    for name in path:
        if name not in node.children:
            raise CheckpointError(
                f"{saved.source}: checkpoint_prefix (--checkpoint-prefix): expected the beginning of its keys, as "
                f"{_listed([f'{child}.' for child in root.children])}, got {prefix!r}"
            )
        node = node.children[name]
    return _candidate(saved, path, node, _root_of(model), model)


def _only(saved: Saved, candidates: list[_Candidate], model: ModelKeys) -> _Candidate:
    """The only candidate with all keys; if no candidate has all, the one that lacks the fewest.

    Raises:
        CheckpointError: several candidates have all keys; or the trained model may be one that lacks some.
    """
    complete = [candidate for candidate in candidates if not candidate.missing]
    if len(complete) > 1:
        raise CheckpointError(
            f"{saved.source}: has all weights of the model {len(complete)} times, under "
            f"{_listed([candidate.prefix for candidate in complete])}: name the one to take: --checkpoint-prefix "
            f"{complete[0].prefix or repr('')} (checkpoint_prefix)"
        )
    if not complete:
        return candidates[0] if candidates else _Candidate((), _Node(), {}, tuple(model.needed))
    (only,) = complete
    rivals = [candidate for candidate in candidates if candidate is not only and _is_rival(candidate, only, model)]
    if rivals:
        lacks = "; ".join(f"{rival.prefix!r} lacks {_described(rival.missing, model)}" for rival in rivals[:2])
        raise CheckpointError(
            f"{saved.source}: has all weights of the model under {only.prefix!r} alone, and some under others: "
            f"{lacks}: expected one model: if {only.prefix!r} is what to serve, name it: --checkpoint-prefix "
            f"{only.prefix} (checkpoint_prefix)"
        )
    return only


def _is_rival(other: _Candidate, only: _Candidate, model: ModelKeys) -> bool:
    """Whether a candidate that lacks keys may be the trained model, and the complete candidate a different one.

    A candidate inside the complete one is no rival. Neither is a sibling, if the complete one has a name that
    trainers give to the model itself.
    """
    used = {*only.keys.values()}
    is_flat = all("." not in key for key in model.needed)
    unused = [key for key in _needed_in(other, model) if other.keys[key] not in used and ("." in key or is_flat)]
    if not unused or other.path[: len(only.path)] == only.path:
        return False
    depth = next((n for n, pair in enumerate(zip(only.path, other.path, strict=False)) if pair[0] != pair[1]), None)
    if depth is None:  # it contains the complete one
        return True
    return only.path[depth] not in _MODEL or other.path[depth] in _MODEL


def _unexpected(chosen: _Candidate, model: ModelKeys) -> list[str]:
    """Keys under the chosen prefix that belong to a module of the model, which does not have them; and keys that
    differ from another one only by the name of a wrapper.
    """
    used, needed = {*chosen.keys.values()}, {_bare(key) for key in _needed_in(chosen, model)}
    modules = {_bare(key)[:1] for key in model.all if len(_bare(key)) > 1}
    unexpected = []
    for path, node in chosen.node.all():
        bare = _bare(".".join(path))
        if node.key is None or node.key in used:
            continue
        is_of_model = model.is_whole and (len(bare) == 1 or bare[:1] in modules)
        if bare in needed or (is_of_model and not ".".join(bare).startswith(model.ignored or ("\0",))):
            unexpected.append(node.key)
    return sorted(unexpected)


def _bare(key: str) -> tuple[str, ...]:
    """The names in a key, without wrappers' names."""
    return tuple(name for name in key.split(".") if name not in WRAPPERS)


def _missing(saved: Saved, chosen: _Candidate, alternatives: list[_Candidate], model: ModelKeys) -> CheckpointError:
    first = chosen.missing[0]
    message = f"{saved.source}: {model.needed[first]}: expected the key {chosen.prefix + first!r}, which is missing"
    if chosen.missing[1:]:
        message += f", as are {_described(chosen.missing[1:], model)}"
    keys = sorted(node.key for _, node in chosen.node.all() if node.key is not None)
    if unknown := [key for key in keys if key not in {*chosen.keys.values()}]:
        message += f"; the model does not have {_listed(unknown)}"
    elif not chosen.keys:
        message += f"; found {_listed(sorted(saved.keys)) or 'nothing'}"
    fitting = [candidate.prefix for candidate in alternatives if not candidate.missing]
    if fitting:
        message += (
            f"; all are under {_listed(fitting)}: --checkpoint-prefix {fitting[0] or repr('')} takes them from there"
        )
    elif alternatives:
        best = alternatives[0]
        message += f"; no prefix has all: {best.prefix!r} lacks {_described(best.missing, model)}"
    return CheckpointError(message)


def _described(keys: Collection[str], model: ModelKeys) -> str:
    return _listed([f"{model.needed[key]} ({key})" for key in keys], quote=False)


def _listed(names: Collection[str], quote: bool = True) -> str:
    shown = [repr(name) if quote else name for name in [*names][:_LISTED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
