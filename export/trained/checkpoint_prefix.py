"""Find the keys of a model in a checkpoint: all of them under one prefix, as load_state_dict(strict=True) takes them.

Trainers save a model inside of dicts (`state_dict`, `model`), inside of other modules (`model.`), and inside of
wrappers, which put a name of their own between two modules (`_orig_mod`, `module`). So a checkpoint may hold a model
several times: an average, a teacher, another tower. Nothing but its keys says which one is meant. A missing key is
never taken from another prefix, and of two prefixes that fit neither is taken.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

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
# What trainers call the model itself, where they save others beside it.
_MODEL = WRAPPERS | {"model", "net", "network", "state_dict", "model_state_dict", "model_state"}
# Keys that a message lists.
_LISTED = 4


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """The keys that the state dict of a model has.

    Attributes:
        needed: keys that a checkpoint must have, with what each is for messages, such as "table 'user'".
        known: all keys of the model.
        twins: keys of one tensor, by each of them. A checkpoint may have one of them alone.
        is_whole: whether the modules that the model has are to have no other keys in the checkpoint. Tables alone are
            right whatever is beside them.
        ignored: beginnings of keys that are never unexpected.
        narrow: the dtype of tensors that the model has in fewer bits than float32.
    """

    needed: Mapping[str, str]
    known: Collection[str]
    twins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_whole: bool = False
    ignored: tuple[str, ...] = ()
    narrow: Mapping[str, torch.dtype] = field(default_factory=dict)

    def saved_as(self, key: str, keys: Collection[str]) -> str | None:
        """`key`, or the first of its twins that is in `keys`. None: none is."""
        return next((each for each in (key, *self.twins.get(key, ())) if each in keys), None)


@dataclass(frozen=True, slots=True)
class Taken:
    """What of a checkpoint is a model's.

    Attributes:
        prefix: of its keys, "" or with a dot at its end.
        keys: the checkpoint's key of each of the model's keys that it has.
        unused: how many tensors of the checkpoint are none of these.
    """

    prefix: str
    keys: Mapping[str, str]
    unused: int


class _Node:
    """Keys that begin alike. `key`: the one that ends here."""

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
        """This node and all below it, each with its names from here."""
        waiting: list[tuple[tuple[str, ...], _Node]] = [((), self)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            waiting += [((*path, name), child) for name, child in node.children.items()]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prefix under which a checkpoint has keys of a model.

    Attributes:
        path: the names of the prefix.
        node: what the checkpoint has under it.
        keys: the checkpoint's key of each of the model's keys that it has.
        missing: needed keys that it lacks.
    """

    path: tuple[str, ...]
    node: _Node
    keys: Mapping[str, str]
    missing: tuple[str, ...]

    @property
    def prefix(self) -> str:
        return "".join(f"{name}." for name in self.path)


def take(source: str, saved: Collection[str], model: ModelKeys, prefix: str | None = None) -> Taken:
    """Find the prefix under which a checkpoint has all keys of a model.

    Args:
        source: the checkpoint, for messages.
        saved: its keys.
        model: the keys to find.
        prefix: the prefix to take. None: the only one that fits.

    Raises:
        CheckpointError: none fits, or several do; or the modules of the model have other keys there.
    """
    root = _Node.of(saved)
    candidates = _candidates(root, model)
    chosen = _only(source, candidates, model) if prefix is None else _named(source, root, model, prefix)
    if chosen.missing:
        others = [each for each in candidates if each.path[: len(chosen.path)] != chosen.path or not each.missing]
        raise _missing(source, chosen, others, model, saved)
    if unexpected := _unexpected(chosen, model):
        raise CheckpointError(
            f"{source}: unexpected keys under {chosen.prefix!r}: {_listed(unexpected)}: the model has none, or has "
            "it already: expected the keys of its state dict, as load_state_dict(strict=True) does: build the model "
            "as it was trained, or save it without them"
        )
    used = {chosen.keys[each] for key in model.needed if (each := model.saved_as(key, chosen.keys)) is not None}
    return Taken(chosen.prefix, chosen.keys, len(saved) - len(used | {*chosen.keys.values()}))


def _candidates(root: _Node, model: ModelKeys) -> list[_Candidate]:
    """All prefixes with a needed key, those that lack the fewest first. Of those with the same keys, the longest."""
    wanted = _Node.of(dict.fromkeys((*model.needed, *model.known)))
    found: dict[frozenset[tuple[str, str]], _Candidate] = {}
    for path, node in root.all():
        candidate = _candidate(path, node, wanted, model)
        needed = frozenset((each, candidate.keys[each]) for each in _needed_in(candidate, model))
        if needed and (needed not in found or len(path) > len(found[needed].path)):
            found[needed] = candidate
    return sorted(found.values(), key=lambda each: (len(each.missing), len(each.path), each.path))


def _candidate(path: tuple[str, ...], node: _Node, wanted: _Node, model: ModelKeys) -> _Candidate:
    keys: dict[str, str] = {}
    _match(wanted, node, keys)
    return _Candidate(path, node, keys, tuple(key for key in model.needed if model.saved_as(key, keys) is None))


def _match(wanted: _Node, node: _Node, keys: dict[str, str]) -> None:
    """Note the keys of `node` that are those of `wanted`. A wrapper that either alone has is passed."""
    if wanted.key is not None and node.key is not None:
        keys[wanted.key] = node.key
    if common := wanted.children.keys() & node.children.keys():
        for name in common:
            _match(wanted.children[name], node.children[name], keys)
    elif wanted.children and node.wrapped is not None:
        _match(wanted, node.wrapped, keys)
    elif wanted.wrapped is not None and node.children:
        _match(wanted.wrapped, node, keys)


def _needed_in(candidate: _Candidate, model: ModelKeys) -> list[str]:
    """The keys of needed tensors that a candidate has, by any of their names."""
    names = dict.fromkeys(each for key in model.needed for each in (key, *model.twins.get(key, ())))
    return [each for each in names if each in candidate.keys]


def _named(source: str, root: _Node, model: ModelKeys, prefix: str) -> _Candidate:
    """The candidate under a prefix that was chosen."""
    path, node = tuple(filter(None, prefix.split("."))), root
    for name in path:
        if name not in node.children:
            raise CheckpointError(
                f"{source}: checkpoint_prefix (--checkpoint-prefix): expected the beginning of its keys, as "
                f"{_listed([*(f'{each}.' for each in root.children)])}, got {prefix!r}"
            )
        node = node.children[name]
    return _candidate(path, node, _Node.of(dict.fromkeys((*model.needed, *model.known))), model)


def _only(source: str, candidates: list[_Candidate], model: ModelKeys) -> _Candidate:
    """The only candidate with all keys; if no candidate has all, the one that lacks the fewest.

    Raises:
        CheckpointError: there are several; or the only one may be another than the one that was trained, which lacks
            some.
    """
    complete = [each for each in candidates if not each.missing]
    if len(complete) > 1:
        raise CheckpointError(
            f"{source}: has all weights of the model {len(complete)} times, under "
            f"{_listed([each.prefix for each in complete])}: name the one to take: --checkpoint-prefix "
            f"{complete[0].prefix or repr('')} (checkpoint_prefix)"
        )
    if not complete:
        return candidates[0] if candidates else _Candidate((), _Node(), {}, tuple(model.needed))
    (only,) = complete
    rivals = [each for each in candidates if each is not only and _is_rival(each, only, model)]
    if rivals:
        lacks = "; ".join(f"{each.prefix!r} lacks {_described(each.missing, model)}" for each in rivals[:2])
        raise CheckpointError(
            f"{source}: has all weights of the model under {only.prefix!r} alone, and some under others: {lacks}: "
            f"expected one model: if {only.prefix!r} is what to serve, name it: --checkpoint-prefix {only.prefix} "
            "(checkpoint_prefix)"
        )
    return only


def _is_rival(other: _Candidate, only: _Candidate, model: ModelKeys) -> bool:
    """Whether a candidate that lacks keys may be the model that was trained, and the one with all keys another.

    Not what is within the complete one; nor what is beside it where that is called as trainers call the model.
    """
    used = {*only.keys.values()}
    is_flat = all("." not in key for key in model.needed)
    own = [key for key in _needed_in(other, model) if other.keys[key] not in used and ("." in key or is_flat)]
    if not own or other.path[: len(only.path)] == only.path:
        return False
    depth = next((n for n, pair in enumerate(zip(only.path, other.path, strict=False)) if pair[0] != pair[1]), None)
    if depth is None:  # around the complete one
        return True
    return only.path[depth] not in _MODEL or other.path[depth] in _MODEL


def _unexpected(chosen: _Candidate, model: ModelKeys) -> list[str]:
    """Keys under the chosen prefix that the model does not have, though it has the module; and those that it has
    twice, once behind a wrapper.
    """
    used, needed = {*chosen.keys.values()}, {_bare(key) for key in _needed_in(chosen, model)}
    modules = {_bare(key)[:1] for key in model.known if len(_bare(key)) > 1}
    found = []
    for path, node in chosen.node.all():
        bare = _bare(".".join(path))
        if node.key is None or node.key in used:
            continue
        is_own = model.is_whole and (len(bare) == 1 or bare[:1] in modules)
        if bare in needed or (is_own and not ".".join(bare).startswith(model.ignored or ("\0",))):
            found.append(node.key)
    return sorted(found)


def _bare(key: str) -> tuple[str, ...]:
    return tuple(name for name in key.split(".") if name not in WRAPPERS)


def _missing(
    source: str, chosen: _Candidate, others: list[_Candidate], model: ModelKeys, saved: Collection[str]
) -> CheckpointError:
    first = chosen.missing[0]
    said = f"{source}: {model.needed[first]}: expected the key {chosen.prefix + first!r}, which is missing"
    if chosen.missing[1:]:
        said += f", as are {_described(chosen.missing[1:], model)}"
    if unknown := [key for key in _keys_under(chosen) if key not in {*chosen.keys.values()}]:
        said += f"; the model does not have {_listed(unknown)}"
    elif not chosen.keys:
        said += f"; found {_listed(sorted(saved)) or 'nothing'}"
    fitting = [each.prefix for each in others if not each.missing]
    if fitting:
        said += (
            f"; all are under {_listed(fitting)}: --checkpoint-prefix {fitting[0] or repr('')} takes them from there"
        )
    elif others:
        said += f"; no prefix has all: {others[0].prefix!r} lacks {_described(others[0].missing, model)}"
    return CheckpointError(said)


def _keys_under(candidate: _Candidate) -> list[str]:
    return sorted(node.key for _, node in candidate.node.all() if node.key is not None)


def _described(keys: Collection[str], model: ModelKeys) -> str:
    return _listed([f"{model.needed[key]} ({key})" for key in keys], quote=False)


def _listed(names: Collection[str], quote: bool = True) -> str:
    shown = [repr(each) if quote else each for each in [*names][:_LISTED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
