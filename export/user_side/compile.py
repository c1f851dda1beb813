"""Compile the dense part for many items of one user, and compare it with the whole dense part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from export.batchability.differences import largest_difference, rounding_limit
from export.batchability.probes import Run
from export.batchability.rounding import Rounding
from export.capture.dense_trace import DenseTrace
from export.capture.graph_inputs import DenseInputs
from export.capture.simplify_graph import simplified
from export.errors import first_line
from export.trained.eval_mode import quiet
from export.trained.source_location import short_line_of
from export.user_side.once_per_user import UserInputs, once_per_user
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseDtype, DensePart, UserSide
from serving.errors import ConfigurationError
from serving.lookup.dense_files import Forward
from serving.torchscript import torchscript

# The users and numbers of items that are compared.
_USERS = (0, 1, 2, 5)
_ITEMS = (1, 2, 7, 33)


@dataclass(frozen=True, slots=True)
class UserSidePrograms:
    """The dense part for many items of one user.

    Attributes:
        user: takes the embeddings of one row, and the user's inputs for one sample.
        items: takes the embeddings of all items, their inputs, and what `user` returns.
        side: for the manifest.
    """

    user: torch.jit.ScriptModule
    items: torch.jit.ScriptModule
    side: UserSide


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A dense part, and which of its inputs are the user's.

    Attributes:
        part: its description.
        names: the keys and dense inputs of the user.
        user_spans: the columns of the user's pooled features in the embeddings, [first, last).
        arguments: the user's inputs, counted without the embeddings.
    """

    part: DensePart
    names: tuple[str, ...]
    user_spans: Sequence[tuple[int, int]]
    arguments: Sequence[int]

    @classmethod
    def of(cls, part: DensePart, names: tuple[str, ...], manifest: Manifest) -> "SplitPart":
        """A dense part of the bundle with `manifest`, whose user has the keys and dense inputs `names`."""
        keys = manifest.key_of_feature
        spans = [span for feature, span in manifest.pooled_columns.items() if keys[feature] in names]
        return cls(part, names, spans, part.arguments_of(names, keys))


def names_of_user_side(patterns: Sequence[str], manifest: Manifest, part: DensePart) -> tuple[str, ...]:
    """The keys and dense inputs that match a pattern, in the order of the manifest.

    Raises:
        ConfigurationError: a pattern matches none, or inputs with a row for each id alone; all match; or of two keys
            with equally many ids in each sample, one is of the user and the other is not.
    """
    names = [*manifest.keys, *(tensor.name for tensor in part.by_sample)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            by_id = next((tensor for tensor in part.inputs if tensor.key and fnmatchcase(tensor.name, pattern)), None)
            hint = f": {by_id.name!r} has a row for each id of {by_id.key!r}, and follows that key" if by_id else ""
            raise ConfigurationError(
                f"user_side {pattern!r}: expected the name of a feature or dense input, or a glob over names, "
                f"matches none of {', '.join(names)}{hint}"
            )
    chosen = tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    if len(chosen) == len(names):
        raise ConfigurationError(
            f"user_side: expected a feature or dense input of the items that no pattern matches, got "
            f"{', '.join(map(repr, patterns))} for {', '.join(names)}"
        )
    for group in part.together:
        if 0 < sum(key in chosen for key in group) < len(group):
            raise ConfigurationError(
                f"user_side: {', '.join(group)} have equally many ids in each sample: name all of them, or none"
            )
    return chosen


def compile_user_side(
    trace: DenseTrace, split: SplitPart, serve: Run, probes: Sequence[DenseInputs]
) -> UserSidePrograms | str:
    """Compile a dense part for many items of one user.

    Args:
        trace: the dense part.
        split: its description.
        serve: runs the whole dense part as it is served.
        probes: inputs of the dense part, the usual ones first.

    Returns:
        The programs, or the reason why every request is scored by the whole dense part.
    """
    part = split.part
    if part.mixes_samples:
        return f"samples may meet in {part.mixed_by}"
    if part.dtype is not DenseDtype.FP32:
        return f"the dense part has {part.dtype.value} weights"
    try:
        programs = _rewritten(trace, split)
        difference = difference_from_whole(programs.user, programs.items, split, serve, probes)
    except Exception as error:  # what the graph has that this pass does not know must not stop an export
        return f"the dense part cannot be split: {first_line(error)}"
    return programs if difference is None else difference


def difference_from_whole(
    user: Forward, items: Forward, split: SplitPart, serve: Run, probes: Sequence[DenseInputs]
) -> str | None:
    """How the programs answer differently than the whole dense part, for several users and numbers of items.

    Args:
        user: the first program: takes the embeddings of one row, and the user's inputs for one sample.
        items: the second: takes the embeddings of all items, their inputs, and what `user` returns.
        split: the description of the dense part.
        serve: runs the whole dense part.
        probes: inputs of the dense part, the usual ones first.

    Returns:
        What differs, or None if rounding explains all differences.
    """
    for probe in probes:
        difference = _difference(user, items, split, serve, probe, is_usual=probe is probes[0])
        if difference is not None:
            return difference
    return None


def _rewritten(trace: DenseTrace, split: SplitPart) -> UserSidePrograms:
    # An empty table takes writes out of the graph, and leaves its operators whole.
    graph = simplified(trace.decomposed({}).module(check_guards=False))
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    user = UserInputs(_merged(split.user_spans), frozenset(number + 1 for number in split.arguments))
    rewritten = once_per_user(graph, placeholders, user)
    left_alone = [f"{node.target}{short_line_of(node)}" for node in rewritten.left_alone]
    side = UserSide(split.names, rewritten.per_user, rewritten.operators, tuple(dict.fromkeys(left_alone)))
    with torchscript(), quiet():
        of_user, of_items = (
            torch.jit.freeze(torch.jit.script(module).eval()) for module in (rewritten.user, rewritten.items)
        )
    return UserSidePrograms(of_user, of_items, side)


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Columns in ascending order, [first, last), adjacent ones as one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and merged[-1][1] == first:
            first = merged.pop()[0]
        merged.append((first, last))
    return tuple(merged)


def _difference(
    user_program: Forward,
    items_program: Forward,
    split: SplitPart,
    serve: Run,
    probe: DenseInputs,
    *,
    is_usual: bool,
) -> str | None:
    """As `difference_from_whole`, of one probe."""
    # A few items may have small scores by chance, which are differences of large numbers.
    limits = {name: rounding_limit(numbers, split.part.dtype) for name, numbers in serve(probe).items()}
    for user, count in zip(_USERS, _ITEMS, strict=True):
        samples = torch.arange(user, user + count) % probe.samples
        whole, tensors = ranking(probe, split, user, samples)
        expected = serve(whole)
        rounding = Rounding(serve, whole, expected, split.part.dtype, is_usual=is_usual)
        with torch.no_grad(), quiet():
            answers = call_programs(user_program, items_program, split, tensors)
        for output, answer in zip(split.part.outputs, answers, strict=True):
            name, numbers = output.name, answer.numpy()
            if numbers.shape != expected[name].shape:
                return f"output {name!r} has the shape {list(numbers.shape)} in place of {list(expected[name].shape)}"
            off = largest_difference(numbers, expected[name])
            if off > limits[name] and not rounding.explains(name, numbers):
                return f"output {name!r} is off by {off:.3g} for {count} items of one user"
    return None


def ranking(
    probe: DenseInputs, split: SplitPart, user: int, samples: Tensor
) -> tuple[DenseInputs, list[tuple[Tensor, Tensor]]]:
    """A probe with one user in all samples: for the whole dense part; and each tensor for one sample, and for all."""
    names, part = split.names, split.part
    of_user, of_items = probe.select(torch.full_like(samples, user)), probe.select(samples)
    row = probe.select(torch.tensor([user]))
    embeddings = of_items.embeddings.clone()
    for first, last in split.user_spans:
        embeddings[:, first:last] = of_user.embeddings[:, first:last]
    dense = tuple(
        user_tensor if tensor.name in names else items_tensor
        for tensor, user_tensor, items_tensor in zip(part.by_sample, of_user.dense, of_items.dense, strict=True)
    )
    bags = {name: (of_user if probe.keys.get(name, name) in names else of_items).bags[name] for name in of_items.bags}
    rows = {name: (of_user if probe.keys[name] in names else of_items).rows[name] for name in of_items.rows}
    whole = replace(of_items, embeddings=embeddings, dense=dense, bags=bags, rows=rows)
    single = replace(row, embeddings=embeddings[:1])
    return whole, [*zip(single.tensors(part.jagged), whole.tensors(part.jagged), strict=True)]


def call_programs(
    user: Forward, items: Forward, split: SplitPart, tensors: Sequence[tuple[Tensor, Tensor]]
) -> Sequence[Tensor]:
    """The outputs of the two programs.

    Args:
        user: the program of the user.
        items: the program of the items.
        split: the description of the dense part.
        tensors: the embeddings, then each other input: for one sample of the user, and for all items.
    """
    (row, rows), *others = tensors
    of_user = user(row, *(others[number][0] for number in split.arguments))
    of_items = [tensor for number, (_, tensor) in enumerate(others) if number not in split.arguments]
    return items(rows, *of_items, *of_user)
