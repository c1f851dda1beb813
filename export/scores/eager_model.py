"""The trained model with stubs in place of its collections: what it answers to the inputs of a dense part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.types import CacheMixin

from export.capture.graph_inputs import DenseInputs
from export.capture.outside_reads import OutsideReads, expect_no_clocks
from export.capture.stub_collections import Collections, Columns, jagged_tensors, keyed_tensor, stubbed
from export.capture.value_checks import failed_check
from export.errors import ModelError, ParityError
from export.scores.dense_subgraph import WAY_OUT, DenseSubgraph, model_errors
from export.scores.served_dtypes import as_served
from export.trained.eval_mode import evaluating, quiet
from export.trained.model_copy import copy_model
from export.trained.model_state import StateItem, model_state
from export.trained.model_weights import replace_tensor
from export.trained.wrapped_collections import is_sequence, takes_weights

Answer = Mapping[str, Tensor]


def eager_answers(
    model: nn.Module,
    subgraph: DenseSubgraph,
    weights: fx.GraphModule,
    collections: Collections,
    probes: Sequence[DenseInputs],
    optional_probes: Sequence[DenseInputs],
) -> list[Answer | None]:
    """What a model answers by its own forward, if its collections answer with the embeddings and rows of a probe.

    Args:
        model: the model. A copy of it is run, with the weights that serve.
        subgraph: its dense subgraph.
        weights: the dense part with the weights that serve.
        collections: of the model.
        probes: inputs of the dense part.
        optional_probes: inputs on which some models cannot be run.

    Returns:
        [B, …] by output, as served, for each probe and then each optional probe. None if the model cannot be run on
        an optional probe, or checks its numbers and refuses a probe after the first.

    Raises:
        ModelError: the model cannot be run on a probe, has an answer without tensors, reads a clock, draws random
            numbers, or changes what it keeps.
        ParityError: it looks up ids that are not those of the probe.
    """
    eager = copy_model(model, collections)
    columns = {
        eager.get_submodule(name): collections[module]
        for name, module in model.named_modules()
        if module in collections
    }
    _set_weights(eager, weights)
    buffers_before = {name: buffer.clone() for name, buffer in _buffers(eager, columns)}
    outside = OutsideReads(eager)

    def answer(probe: DenseInputs) -> Answer:
        return _answer(eager, subgraph, columns, probe)

    answers: list[Answer | None] = []
    for probe in probes:
        try:
            with nullcontext() if subgraph.is_timeless else outside.running():
                answers.append(answer(probe))
        except ModelError as error:
            if probe is probes[0] or not failed_check(error.__cause__):
                raise
            answers.append(None)
    expect_no_clocks(model, outside.clocks)
    outside.expect_no_draws()
    _expect_no_count(eager, answers[0], lambda: answer(probes[0]))
    for probe in optional_probes:
        try:
            answers.append(answer(probe))
        except ModelError:
            answers.append(None)
    for name, buffer in _buffers(eager, columns):
        if not _is_same(buffer, buffers_before[name]):
            raise ModelError(
                f"{type(model).__name__}: its forward changes the buffer {name!r}: requests are scored by what they "
                f"bring alone: {WAY_OUT}"
            )
    return answers


# A model that counts its calls must answer as before after these numbers of calls.
_CALLS = (1_003, 1_000_003, 1_000_000_007)


def _expect_no_count(model: nn.Module, answer: Answer | None, answer_again: Callable[[], Answer]) -> None:
    """Refuse a model that counts its calls and answers differently after many of them.

    The model was called before, so what it caches is there. What one more call changes is a count.

    Args:
        model: a copy.
        answer: to a probe.
        answer_again: calls the model with the same probe.
    """
    state_before = model_state(model)
    if answer is None or not _are_same(answer, answer_again()):
        return  # its answers differ from call to call, which other checks report
    counts = [state for key, state in model_state(model).items() if not state.equals(state_before.get(key))]
    if counts and not all(_answers_same_after(calls, counts, answer, answer_again) for calls in _CALLS):
        names = [repr(count.key) for count in counts if isinstance(count.key, str)] or ["a number that it keeps"]
        raise ModelError(
            f"{type(model).__name__}: its forward changes {names[0]}, and answers by it: requests are scored by "
            f"what they bring alone: {WAY_OUT}"
        )


def _answers_same_after(
    calls: int, counts: Sequence[StateItem], answer: Answer, answer_again: Callable[[], Answer]
) -> bool:
    for count in counts:
        count.add_calls(calls)
    try:
        return _are_same(answer, answer_again())
    except ModelError:
        return False
    finally:
        for count in counts:
            count.restore()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two buffers have the same numbers. NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _are_same(one: Answer, other: Answer) -> bool:
    return all(torch.allclose(tensor, other[name], 0, 0, equal_nan=True) for name, tensor in one.items())


def _answer(model: nn.Module, subgraph: DenseSubgraph, collections: Collections, probe: DenseInputs) -> Answer:
    changed_keys: list[str] = []

    def lookup(collection: nn.Module, columns: Columns, ids: KeyedJaggedTensor) -> Any:
        changed_keys.extend(_changed_keys(collection, columns, ids, probe))
        if is_sequence(collection):
            return jagged_tensors(columns, ids, {name: rows.clone() for name, rows in probe.rows.items()})
        return keyed_tensor(columns, probe.embeddings.clone())

    failure = f"its forward fails for embeddings and dense inputs [{probe.samples}, width]"
    with (
        torch.no_grad(),
        evaluating(model),
        quiet(),
        stubbed(collections, lookup),
        model_errors(subgraph.model_name, failure),
    ):
        answer = subgraph.eager_answer(model, probe.copied())
        served = {name: as_served(tensor) for name, tensor in answer.items()}
    if changed_keys:
        raise ParityError(
            f"{type(model).__name__}: gives a collection ids, lengths or weights of key {changed_keys[0]!r} that are "
            "not those of the request: lookups would not see it: do it before the model"
        )
    return served


def _changed_keys(
    collection: nn.Module, columns: Columns, ids: KeyedJaggedTensor, probe: DenseInputs
) -> Iterator[str]:
    """The keys whose ids, lengths or weights in a collection differ from those of the probe."""
    looked_up = ids.to_dict()  # as collections do
    for key in columns.keys:
        bag = probe.bags.get(key)
        jagged = looked_up[key]
        if bag is None:
            continue
        is_same = torch.equal(jagged.values().long(), bag.ids.long())
        if key not in probe.fixed:
            is_same &= torch.equal(jagged.lengths().long(), bag.lengths.long())
        if takes_weights(collection) and bag.weights is not None:
            is_same &= torch.equal(jagged.weights().float(), bag.weights.float())
        if not is_same:
            yield key


def _set_weights(model: nn.Module, weights: fx.GraphModule) -> None:
    """Give a model the parameters and buffers of its dense part, which have the same names."""
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    for name, weight in [*weights.named_parameters(), *weights.named_buffers()]:
        if name in tensors:
            replace_tensor(model, tensors[name], weight)


def _buffers(model: nn.Module, collections: Collections) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a model outside of its collections and of modules that cache what they computed of a batch."""
    caches = (module for module in model.modules() if isinstance(module, CacheMixin))
    excluded = {id(buffer) for module in (*collections, *caches) for buffer in module.buffers()}
    for name, buffer in model.named_buffers():
        if id(buffer) not in excluded and not buffer.is_meta:
            yield name, buffer
