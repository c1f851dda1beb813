"""The trained model behind its collections: a copy of it is run on embeddings that are given to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.types import CacheMixin

from export.batchability.probes import as_served
from export.capture.graph_inputs import DenseInputs
from export.capture.outside_reads import TIME_ADVICE, OutsideReads
from export.capture.stub_collections import Collections, Columns, jagged_tensors, keyed_tensor, stubbed
from export.capture.value_checks import failed_check
from export.errors import ExportError, ModelError, ParityError, last_line
from export.scores.split_at_collections import WAY_OUT, DenseSubgraph
from export.trained.managed import is_sequence, takes_weights
from export.trained.model_weights import take_place
from export.trained.running import Held, copied, evaluating, held, quiet


@contextmanager
def model_errors(model: nn.Module, what: str, said: Callable[[Exception], str] = last_line) -> Iterator[None]:
    """Refuse `model` for any error in here.

    Args:
        model: the model.
        what: what it cannot do.
        said: the line of the error for the message.

    Raises:
        ModelError: naming the model, what it cannot do, what the error said, and the way out.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # its code may raise anything
        raise ModelError(f"{type(model).__name__}: {what}: {said(error)}: {WAY_OUT}") from error


def answers_behind(
    model: nn.Module,
    found: DenseSubgraph,
    weights: fx.GraphModule,
    collections: Collections,
    probes: Sequence[DenseInputs],
    others: Sequence[DenseInputs] = (),
) -> list[dict[str, Tensor] | None]:
    """What a model answers by its own forward, where its collections answer with embeddings and rows that are given.

    Args:
        model: the model. A copy of it is run, with the weights that serve.
        found: what was cut out of it.
        weights: what was cut out, with the weights that serve.
        collections: of the model.
        probes: what is given.
        others: what may be given, and some models cannot be run on.

    Returns:
        [B, …] by output, as they are served, for each probe, then for each of `others`. None where the model cannot
        be run on one, or refuses the numbers of a probe after the first.

    Raises:
        ModelError: it cannot be run on a probe, answers with something else, or changes a buffer.
        ParityError: it gives a collection other ids than those that are given.
    """
    own = copied(model, collections)
    columns = {
        own.get_submodule(name): collections[each] for name, each in model.named_modules() if each in collections
    }
    _take_weights(own, weights)
    before = {name: each.clone() for name, each in _buffers(own, columns)}
    answers: list[dict[str, Tensor] | None] = []
    outside = OutsideReads(own)
    for probe in probes:
        try:
            with nullcontext() if found.is_timeless else outside.running():
                answers.append(_answer_behind(own, found, columns, probe))
        except ModelError as error:
            if probe is probes[0] or not failed_check(error.__cause__):
                raise
            answers.append(None)  # it checks its numbers
    if outside.clocks:
        raise ModelError(
            f"{type(model).__name__}: its forward asks for the time{outside.clocks[0]}: expected {TIME_ADVICE}"
        )
    outside.expect_no_draws()
    _expect_no_count(own, answers[0], lambda: _answer_behind(own, found, columns, probes[0]))
    for other in others:
        try:
            answers.append(_answer_behind(own, found, columns, other))
        except ModelError:
            answers.append(None)
    for name, each in _buffers(own, columns):
        if not _is_same(each, before[name]):
            raise ModelError(
                f"{type(model).__name__}: its forward changes the buffer {name!r}: requests are scored by what they "
                f"bring alone: {WAY_OUT}"
            )
    return answers


# After so many more calls a model that counts them is to answer as before.
_CALLS = (1_003, 1_000_003, 1_000_000_007)


def _expect_no_count(
    model: nn.Module, answer: Mapping[str, Tensor] | None, again: Callable[[], Mapping[str, Tensor]]
) -> None:
    """Refuse a model that counts its calls, and answers otherwise after many of them.

    What it keeps of a call is settled by now. What one more call changes is a count.

    Args:
        model: a copy, which was called.
        answer: to a probe.
        again: calls it with that probe.
    """
    before = held(model)
    if answer is None or not _are_alike(answer, again()):
        return  # no two of its answers are the same: other checks say why
    changed = [each for key, each in held(model).items() if not each.is_as(before.get(key))]
    if changed and not all(_are_alike_after(calls, changed, answer, again) for calls in _CALLS):
        names = [repr(each.key) for each in changed if isinstance(each.key, str)] or ["a number that it keeps"]
        raise ModelError(
            f"{type(model).__name__}: its forward changes {names[0]}, and answers by it: requests are scored by "
            f"what they bring alone: {WAY_OUT}"
        )


def _are_alike_after(
    calls: int, changed: Sequence[Held], answer: Mapping[str, Tensor], again: Callable[[], Mapping[str, Tensor]]
) -> bool:
    """Whether a model answers as before after so many more calls."""
    for each in changed:
        each.count_on(calls)
    try:
        return _are_alike(answer, again())
    except ModelError:
        return False
    finally:
        for each in changed:
            each.put_back()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two buffers have the same numbers; NaN is the same as NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _are_alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.allclose(each, other[name], 0, 0, equal_nan=True) for name, each in one.items())


def _answer_behind(
    model: nn.Module, found: DenseSubgraph, collections: Collections, given: DenseInputs
) -> dict[str, Tensor]:
    wrong: list[str] = []

    def answer(collection: nn.Module, columns: Columns, ids: KeyedJaggedTensor) -> Any:
        wrong.extend(_others(collection, columns, ids, given))
        if is_sequence(collection):
            return jagged_tensors(columns, ids, {name: each.clone() for name, each in given.rows.items()})
        return keyed_tensor(columns, given.embeddings.clone())

    what = f"its forward fails for embeddings and dense inputs [{given.samples}, width]"
    with torch.no_grad(), evaluating(model), quiet(), stubbed(collections, answer), model_errors(model, what):
        answered = {name: as_served(each) for name, each in found.answer(model, given.copied()).items()}
    if wrong:
        raise ParityError(
            f"{type(model).__name__}: gives a collection ids, lengths or weights of key {wrong[0]!r} that are not "
            "those of the request: lookups would not see it: do it before the model"
        )
    return answered


def _others(collection: nn.Module, columns: Columns, ids: KeyedJaggedTensor, given: DenseInputs) -> Iterator[str]:
    """The keys of which a collection looks up something else than is given."""
    found = ids.to_dict()  # as collections do
    for key in columns.keys:
        bag, own = given.bags.get(key), found[key]
        if bag is None:
            continue
        is_same = torch.equal(own.values().long(), bag.ids.long())
        if key not in given.fixed:
            is_same &= torch.equal(own.lengths().long(), bag.lengths.long())
        if takes_weights(collection) and bag.weights is not None:
            is_same &= torch.equal(own.weights().float(), bag.weights.float())
        if not is_same:
            yield key


def _take_weights(model: nn.Module, weights: fx.GraphModule) -> None:
    """Give a model the parameters and buffers of what was cut out of it, which have the same names."""
    own = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    for name, each in [*weights.named_parameters(), *weights.named_buffers()]:
        if name in own:
            take_place(model, own[name], each)


def _buffers(model: nn.Module, collections: Collections) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a model outside of its collections, and of modules that keep what they computed of a batch."""
    caches = (each for each in model.modules() if isinstance(each, CacheMixin))
    inside = {id(each) for part in (*collections, *caches) for each in part.buffers()}
    yield from ((name, each) for name, each in model.named_buffers() if id(each) not in inside and not each.is_meta)
