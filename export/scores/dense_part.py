"""The dense part of a trained model: cut out, given its weights, compiled, and compared with the model itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.batchability.mixed_samples import find_branch, find_mixing, find_opaque_step
from export.batchability.probes import (
    Numbers,
    Rounding,
    Run,
    answered,
    as_served,
    largest_difference,
    moved,
    probe_mixing,
    rounding_limit,
    scale_of,
    scaled_probes,
    split_sizes,
)
from export.capture.graph_inputs import DenseInputs
from export.capture.graph_nodes import draws
from export.capture.stub_collections import Collections
from export.config import Example
from export.errors import ModelError, ParityError, compiler_line
from export.scores.dense_inputs import answer_as_served, merge_adjacent_columns, with_dtype, with_weights
from export.scores.dense_model import dense_model_of_example, dense_model_of_forward, dense_model_of_module
from export.scores.eager_model import answers_behind, model_errors
from export.scores.probe_inputs import ByFeature, collection_columns, other_requests, with_embeddings
from export.scores.split_at_collections import WAY_OUT, DenseSubgraph, changes_inputs, keep_inputs
from export.trained.checkpoint import Checkpoint
from export.trained.managed import is_sequence, looking_up
from export.trained.probe import listening
from export.trained.running import evaluating, quiet
from export.trained.source_location import line_of
from export.trained.tables import Trained
from serving.bundle.manifest import Manifest
from serving.bundle.scores import SCORE_DTYPES, DenseDtype, DensePart, ScoreOutput, ScoreParity
from serving.lookup.program import torchscript
from serving.requests.types import Ids, Tensors


@dataclass(frozen=True, slots=True)
class CompiledDensePart:
    """A dense part that is ready to be written.

    Attributes:
        program: compiled, for the dtype that serves.
        part: for the manifest. Its parity lacks `trained`.
        request: ids of all keys, which the published files answer for `compare_scores`.
        given: the same request, with dense inputs.
        trained: what the trained model answers it with, by output; None where it could not be run.
        answer: what the trained model answers to ids and dense inputs, by output; None likewise.
        notes: what of the example requests do not bring, a line each.
    """

    program: torch.jit.ScriptModule
    part: DensePart
    request: Tensors
    given: DenseInputs
    trained: Mapping[str, Numbers] | None
    answer: Callable[[DenseInputs], dict[str, Numbers]] | None
    notes: tuple[str, ...] = ()


def compile_dense_part(
    trained: Trained,
    manifest: Manifest,
    known: Mapping[str, Ids],
    widths: Mapping[str, int],
    dtype: DenseDtype,
    checkpoint: Checkpoint | None,
    own: nn.Module | None = None,
    example: Example | None = None,
) -> CompiledDensePart:
    """Cut the dense part out of a trained model, compile it, and compare it with the model.

    Args:
        trained: the model and its collections.
        manifest: features and tables of the bundle.
        known: ids of each key with a map.
        widths: of dense inputs that no nn.Linear takes, by name. With an example they are those of the example.
        dtype: of its weights.
        checkpoint: has its tables, and the model its other weights; None: the model itself has all.
        own: takes the place of what follows the collections, with its own weights. It is not compared with the model.
        example: a call of the model. None: its arguments are one KJT and dense inputs [B, width].

    Raises:
        ModelError: the model cannot be cut or compiled, or answers otherwise than with tensors [B, …].
        ConfigurationError: the width of an input is not known.
        CheckpointError: a weight is missing.
        ParityError: what was cut out answers otherwise than the model.
    """
    columns = collection_columns(trained, manifest)
    if own is not None:
        behind = dense_model_of_module(trained, manifest, known, widths, own)
    elif example is not None:
        behind = dense_model_of_example(trained, manifest, columns, example)
    else:
        behind = dense_model_of_forward(trained, manifest, known, widths, columns)
    entry, found, given = behind.entry, behind.cut, behind.given
    if keys := [each.name for each in behind.inputs if each.name in manifest.keys]:
        raise ModelError(
            f"{type(entry).__name__}: dense input {keys[0]!r}: expected a name that no key has: rename it in the "
            "forward"
        )
    own_answers: Mapping[str, Numbers] | None = None
    answer = None
    if own is None and checkpoint is None:
        answer = partial(_own_answer, entry, found)
        given, own_answers = _answers_of_model(entry, found, columns, given)
    module = with_weights(found, behind.path, trained.found.collections, None if own is not None else checkpoint)
    run = partial(_run, entry, module, found)
    with _Draws() as drawn:
        answer_as_served(module, _answers(entry, module, found, given), found.outputs)
    drawn.expect_none(entry)
    probes = [given, *(probe for probe, _ in answered(run, scaled_probes(given)))]
    if own is None:
        others = [] if example is None else [*other_requests(given, columns)]
        with _Draws() as drawn:
            answers = answers_behind(entry, found, module, columns, probes, [each for _, each in others])
        if example is None:  # torch.fx runs what no input is part of, and keeps the numbers; torch.export does not
            drawn.expect_none(entry)
        for probe, each in zip(probes, answers, strict=False):
            _check_cut(entry, each or {}, run, probe, is_usual=probe is probes[0])
        for (what, other), each in zip(others, answers[len(probes) :], strict=True):
            _check_other(entry, what, each, next((own for _, own in answered(run, [other])), None))
    serving = merge_adjacent_columns(module, given.embeddings.shape[1])
    if changes_inputs(serving, given.tensors(found.jagged)):
        serving = module
        if changes_inputs(module, given.tensors(found.jagged)):
            keep_inputs(module)
    program = _compiled(entry, serving, dtype)
    serve = partial(_run, entry, program, found)
    outputs = _compared(entry, run, serve, probes, dtype, found.by_id)
    mixed_by = _mixed_by(module, found, given, dtype, None if own is None else program)
    mixed_by = mixed_by or probe_mixing(serve, given, dtype, found.by_id)
    part = DensePart(
        behind.inputs,
        outputs,
        dtype,
        mixes_samples=mixed_by is not None,
        mixed_by=mixed_by,
        is_own=own is not None,
        jagged=found.jagged,
        fixed_lengths={key: count for key, count in given.fixed.items() if key in manifest.keys},
    )
    part = msgspec.structs.replace(part, together=_together(part, manifest, given))
    return CompiledDensePart(program, part, behind.request, given, own_answers, answer, behind.notes)


def _together(part: DensePart, manifest: Manifest, given: DenseInputs) -> tuple[tuple[str, ...], ...]:
    """The groups of keys that have as many ids in each sample: a dense part takes something of them; or the forward
    gives a collection the lengths of one for another."""
    keys = {each.name: each.key for each in manifest.features}
    groups: dict[str, list[str]] = {}
    shared = (key for pair in given.first.items() for key in pair if key in manifest.keys)
    for key in dict.fromkeys((*(part.key_of(each, keys) for each in part.jagged), *shared)):
        groups.setdefault(given.key_of(key), []).append(key)
    return tuple(tuple(each) for each in groups.values() if len(each) > 1)


def _mixed_by(
    module: fx.GraphModule,
    found: DenseSubgraph,
    given: DenseInputs,
    dtype: DenseDtype,
    own: torch.jit.ScriptModule | None,
) -> str | None:
    """What may let samples meet, as it is read off the operators; None: nothing."""
    if dtype is DenseDtype.INT8 and any(isinstance(each, nn.Linear) for each in module.modules()):
        return "INT8, which quantizes what an nn.Linear takes by the range that it has in a batch"
    mixed_by = find_opaque_step(module) if own is None else find_branch(own)
    by_id = {at: found.by_id[name] for at, name in enumerate(found.outputs) if name in found.by_id}
    return mixed_by or find_mixing(module, given, found.jagged, own, by_id)


def compare_scores(scored: CompiledDensePart, answer: ByFeature) -> DensePart:
    """The dense part with how far served scores are from those of the trained model.

    Args:
        scored: what was compiled.
        answer: of the published files to its request, by feature; float32 or float16, [B, dim], or [n, dim].
    """
    given = with_embeddings(scored.given, answer)
    names = [each.name for each in scored.part.outputs]
    with torch.no_grad():
        found = scored.program(*given.tensors(scored.part.jagged))
    served = {name: each.numpy() for name, each in zip(names, found, strict=True)}
    outputs = []
    for output in scored.part.outputs:
        numbers = served[output.name]
        if scored.trained is None:  # what was compared before was made of random embeddings
            parity = msgspec.structs.replace(output.parity, scale=scale_of(numbers))
        else:
            off = moved(numbers, scored.trained[output.name])
            mean = float(off.mean())
            parity = msgspec.structs.replace(output.parity, trained=float(off.max()), trained_mean=mean)
        outputs.append(msgspec.structs.replace(output, parity=parity))
    return msgspec.structs.replace(scored.part, outputs=tuple(outputs))


def save_scores(program: torch.jit.ScriptModule, path: Path) -> None:
    """Write a dense part to `path`."""
    path.write_bytes(program.save_to_buffer())


def _answers_of_model(
    entry: nn.Module, found: DenseSubgraph, columns: Collections, given: DenseInputs
) -> tuple[DenseInputs, dict[str, Numbers]]:
    """What is given, with the embeddings and rows of the model itself; and what the model answers, by output."""
    heard: dict[nn.Module, Any] = {}
    hearing = listening(columns, heard)
    with hearing, model_errors(entry, "its forward fails for ids of all features, and dense inputs in [0, 1)"):
        answer = _own_answer(entry, found, given)
    pooled, rows = given.embeddings.clone(), {**given.rows}
    for collection, own in heard.items():  # one that the forward does not call answers nothing
        these = columns[collection]
        if is_sequence(collection):
            named = zip(these.features, these.names, strict=True)
            rows |= {feature: own[name].values().float().cpu() for feature, name in named}
            continue
        pieces = own.values().split(own.length_per_key(), dim=1)
        for (first, last), piece in zip(these.spans, pieces, strict=True):
            pooled[:, first:last] = piece
    return replace(given, embeddings=pooled, rows=rows), answer


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the block, records the operators that draw random numbers.

    A comparison of answers does not show all of them: what is drawn may count for some requests alone, or be small.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            self._operators.append(str(func))
        return func(*args, **(kwargs or {}))

    def expect_none(self, entry: nn.Module) -> None:
        """Refuse a dense part that drew random numbers.

        Raises:
            ModelError: naming the operator.
        """
        if self._operators:
            raise ModelError(
                f"{type(entry).__name__}: what follows the collections draws random numbers in eval mode, by "
                f"{self._operators[0]}: expected none, as no two of its answers are the same: draw them "
                "`if self.training`"
            )


def _own_answer(entry: nn.Module, found: DenseSubgraph, given: DenseInputs) -> dict[str, Numbers]:
    """What the model itself answers, by output, to ids and dense inputs."""
    with torch.no_grad(), evaluating(entry), looking_up(entry), quiet():
        answer = found.answer(entry, given.copied())
    return {name: as_served(each).cpu().numpy() for name, each in answer.items()}


def _check_cut(
    entry: nn.Module, model: Mapping[str, Tensor], run: Run, probe: DenseInputs, *, is_usual: bool
) -> None:
    cut_out = run(probe)
    rounding = Rounding(run, probe, cut_out, DenseDtype.FP32, is_usual=is_usual)
    for name, numbers in ((name, each.numpy()) for name, each in model.items()):
        if not rounding.explains(name, numbers):
            raise ParityError(
                f"{type(entry).__name__}: output {name!r}: what follows the collections answers otherwise than the "
                f"model, by {largest_difference(cut_out[name], numbers):.3g}: something that a graph of its forward "
                f"does not have changes it, such as a hook, autocast, random numbers, += on a part of a tensor, or "
                f"the fast path of nn.TransformerEncoder at padding (enable_nested_tensor=False): {WAY_OUT}"
            )


def _check_other(
    entry: nn.Module, what: str, model: Mapping[str, Tensor] | None, cut_out: Mapping[str, Numbers] | None
) -> None:
    """Refuse a model that does something else for such a request than its graph. One that cannot answer it may be."""
    for name, each in (model or {}).items() if cut_out is not None else ():
        numbers, own = each.numpy(), (cut_out or {})[name]
        if numbers.size == own.size:  # .squeeze() may have left out the dimension of one sample
            numbers = numbers.reshape(own.shape)
        if largest_difference(own, numbers) > rounding_limit(numbers, DenseDtype.FP32):
            raise ParityError(
                f"{type(entry).__name__}: output {name!r}: its forward does something else for a request {what}, by "
                f"{largest_difference(own, numbers):.3g}: expected the same steps for any number of samples and ids, "
                f"also at padding (nn.TransformerEncoder: enable_nested_tensor=False): {WAY_OUT}"
            )


def _run(entry: nn.Module, module: nn.Module, found: DenseSubgraph, given: DenseInputs) -> dict[str, Numbers]:
    """The outputs of a dense part, by name."""
    answers = _answers(entry, module, found, given)
    return {name: each.cpu().numpy() for name, each in zip(found.outputs, answers, strict=True)}


def _answers(entry: nn.Module, module: nn.Module, found: DenseSubgraph, given: DenseInputs) -> Sequence[Tensor]:
    """What a dense part answers, in the order of its outputs."""
    what = f"its forward cannot be run for {given.samples} samples behind its collections"
    with torch.no_grad(), quiet(), model_errors(entry, what):
        answer: Sequence[Tensor] = module(*(each.clone() for each in given.tensors(found.jagged)))
    for name, each in zip(found.outputs, answer, strict=True):
        key = found.by_id.get(name)
        rows, what = (given.samples, "samples") if key is None else (len(given.bags[key].ids), f"ids of {key!r}")
        if each.ndim == 0 or len(each) != rows:
            raise ModelError(
                f"{type(entry).__name__}: output {name!r}: expected shape [{rows}, …] for {rows} {what}, got "
                f"{list(each.shape)}: {WAY_OUT}"
            )
    return answer


def _compared(
    entry: nn.Module, run: Run, serve: Run, probes: Sequence[DenseInputs], dtype: DenseDtype, by_id: Mapping[str, str]
) -> tuple[ScoreOutput, ...]:
    """The outputs, with their parity for the first probe.

    Raises:
        ParityError: compiled, a dense part with weights in FP32 answers otherwise.
    """
    found = [(run(probe), serve(probe)) for probe in probes]
    for probe, (exact, served) in zip(probes, found if dtype is DenseDtype.FP32 else found[:1], strict=False):
        rounding = Rounding(run, probe, exact, dtype, is_usual=probe is probes[0])
        for name, numbers in exact.items():
            off = largest_difference(served[name], numbers)
            if not (rounding.explains(name, served[name]) if dtype is DenseDtype.FP32 else np.isfinite(off)):
                raise ParityError(
                    f"{type(entry).__name__}: output {name!r}: compiled, it is off by {off:.3g}, where the largest "
                    f"is {scale_of(numbers):.3g}"
                )
    (exact, served), sizes = found[0], split_sizes(probes[0].samples)
    pieces = [serve(probes[0].at(piece)) for piece in torch.split(torch.arange(probes[0].samples), sizes)]
    outputs = []
    for name, numbers in exact.items():
        alone = np.concatenate([piece[name] for piece in pieces])
        parity = ScoreParity(
            scale_of(numbers), largest_difference(served[name], numbers), largest_difference(served[name], alone)
        )
        outputs.append(ScoreOutput(name, numbers.shape[1:], parity, by_id.get(name), SCORE_DTYPES[numbers.dtype]))
    return tuple(outputs)


def _compiled(entry: nn.Module, module: fx.GraphModule, dtype: DenseDtype) -> torch.jit.ScriptModule:
    """A dense part as it serves: in TorchScript, frozen, with weights of `dtype`."""
    steps = {node.name: line_of(node) for node in module.graph.nodes}

    def where(step: str) -> str:
        return steps.get(step.partition(" = ")[0], "")

    said = partial(compiler_line, line_of=where)
    with torchscript(), quiet(), model_errors(entry, "its forward cannot be compiled", said):
        program: torch.jit.ScriptModule = torch.jit.freeze(torch.jit.script(with_dtype(module, dtype)).eval())
    return program
