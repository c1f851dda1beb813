"""The dense part of a trained model: split off, given its weights, compiled, and compared with the model itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx, nn

from export.batchability.branches import find_branch, find_opaque_step
from export.batchability.differences import Numbers, differences, scale_of
from export.batchability.find_mixing import find_mixing
from export.batchability.probe_mixing import probe_mixing
from export.batchability.probes import Run, run_probes, scaled_probes
from export.capture.dense_trace import DenseTrace
from export.capture.graph_inputs import DenseInputs
from export.capture.stub_collections import Collections
from export.config import ExportConfig
from export.errors import ModelError
from export.scores.collection_columns import collection_columns
from export.scores.dense_formats import DenseFormats, compile_formats
from export.scores.dense_model import (
    DenseModel,
    dense_model_of_example,
    dense_model_of_forward,
    dense_model_of_module,
)
from export.scores.dense_subgraph import DenseSubgraph, model_errors
from export.scores.dense_weights import with_weights
from export.scores.eager_model import eager_answers
from export.scores.merge_columns import merge_adjacent_columns
from export.scores.probe_inputs import ByFeature, with_embeddings
from export.scores.random_draws import RandomDraws
from export.scores.score_parity import (
    expect_model_scores,
    expect_variation_scores,
    measure_outputs,
)
from export.scores.served_dtypes import as_served, cast_outputs
from export.scores.varied_requests import varied_requests
from export.scores.written_inputs import copy_inputs, writes_to_inputs
from export.trained.checkpoint import Checkpoint
from export.trained.eval_mode import evaluating, quiet
from export.trained.managed_collision import looking_up
from export.trained.tables import Trained
from export.trained.trained_answers import record_answers
from export.trained.wrapped_collections import is_sequence
from export.user_side.compile import SplitPart, UserSidePrograms, compile_user_side, names_of_user_side
from export.user_side.fewest_items import with_fewest_items
from serving.bundle.manifest import Manifest
from serving.bundle.scores import (
    ITEMS_PROGRAM,
    USER_PROGRAM,
    USER_SIDE_NAMES,
    DenseDtype,
    DenseFile,
    DensePart,
)
from serving.requests.types import Ids, Tensors

# Samples of requests on which the formats of a dense part are compared, beside all samples of a probe.
_FEW_SAMPLES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class CompiledDensePart:
    """A dense part that is ready to be written.

    Attributes:
        formats: compiled, with the dtype that serves.
        part: for the manifest. Its parity lacks `trained`.
        request: ids of all keys, as a probe for `compare_scores`.
        inputs: the same request with dense inputs.
        trained_scores: what the trained model answers to the probe, by output, or None if it cannot be run.
        eager_scores: runs the trained model on ids and dense inputs, or None if it cannot be run.
        notes: a line for each part of an example that requests do not bring; and why there are no programs for a user
            side.
        user_side: the programs for many items of one user, or None.
    """

    formats: DenseFormats
    part: DensePart
    request: Tensors
    inputs: DenseInputs
    trained_scores: Mapping[str, Numbers] | None
    eager_scores: Callable[[DenseInputs], dict[str, Numbers]] | None
    notes: tuple[str, ...] = ()
    user_side: UserSidePrograms | None = None


def compile_dense_part(
    trained: Trained,
    manifest: Manifest,
    known_ids: Mapping[str, Ids],
    config: ExportConfig,
    checkpoint: Checkpoint | None = None,
    user_module: nn.Module | None = None,
    native: DenseFile | None = None,
) -> CompiledDensePart:
    """Split the dense part off a trained model, compile it, and compare it with the model.

    Args:
        trained: the model and its collections.
        manifest: features and tables of the bundle.
        known_ids: known ids of each key with a map.
        config: how the dense part is exported: `dense_dtype`, `dense_widths`, `example` and `user_side`.
        checkpoint: has the weights of the tables. None: the model has them itself.
        user_module: a module of the user's own in place of the model's layers. It is not compared with the model.
        native: also compile it to native code, for this file. None: it is not.

    Raises:
        ModelError: the model cannot be traced or compiled, or an answer has no tensors [B, …].
        ConfigurationError: the width of an input is not known, or a pattern matches no key and no dense input.
        CheckpointError: a weight is missing.
        ParityError: the dense part answers differently than the model.
    """
    columns, dtype = collection_columns(trained, manifest), config.dense_dtype
    if user_module is not None:
        dense_model = dense_model_of_module(trained, manifest, known_ids, config.dense_widths, user_module)
    elif config.example is not None:
        dense_model = dense_model_of_example(trained, manifest, columns, config.example)
    else:
        dense_model = dense_model_of_forward(trained, manifest, known_ids, config.dense_widths, columns)
    _expect_no_key_names(dense_model, manifest)
    model, subgraph, inputs = dense_model.model, dense_model.subgraph, dense_model.inputs
    trained_scores: Mapping[str, Numbers] | None = None
    eager_scores = None
    if user_module is None and checkpoint is None:
        eager_scores = partial(_eager_scores, model, subgraph)
        inputs, trained_scores = _trained_scores(model, subgraph, columns, inputs)
    table_weights = checkpoint if user_module is None else None
    module = with_weights(subgraph, dense_model.path, trained.collections, table_weights)
    with RandomDraws() as draws:
        cast_outputs(module, subgraph.run(module, inputs), subgraph.output_names)
    draws.expect_none(model)
    run = partial(subgraph.scores, module)
    probes = [inputs, *(probe for probe, _ in run_probes(run, scaled_probes(inputs)))]
    variations = [] if config.example is None else [*varied_requests(inputs, columns)]
    if user_module is None:
        _expect_parity(model, subgraph, module, columns, run, probes, variations)
    small_requests = [inputs.select(torch.arange(samples)) for samples in _FEW_SAMPLES]
    requests = [*probes, *small_requests, *(request for _, request in variations)]
    is_own = user_module is not None
    trace = DenseTrace(_without_writes(module, subgraph, inputs), inputs, subgraph.jagged)
    formats = compile_formats(trace, subgraph, dtype, requests, native, is_own=is_own)
    serve = partial(subgraph.scores, formats.forward)
    outputs = measure_outputs(subgraph, run, serve, probes, dtype)
    mixed_by = _mixed_by(trace, subgraph, dtype, formats.scripted, is_own=is_own)
    mixed_by = mixed_by or probe_mixing(serve, inputs, dtype, subgraph.by_id)
    part = DensePart(
        dense_model.dense_inputs,
        outputs,
        dtype,
        mixes_samples=mixed_by is not None,
        mixed_by=mixed_by,
        is_own=is_own,
        jagged=subgraph.jagged,
        fixed_lengths={key: count for key, count in inputs.fixed.items() if key in manifest.keys},
        files=formats.described,
    )
    part = msgspec.structs.replace(part, together=_keys_of_equal_lengths(part, manifest, inputs))
    notes, programs = (*dense_model.notes, *formats.notes), None
    if config.user_side:
        split = SplitPart.of(part, names_of_user_side(config.user_side, manifest, part), manifest)
        compiled = compile_user_side(trace, split, serve, probes)
        if isinstance(compiled, str):
            notes = (*notes, f"user_side: all requests are scored by the whole dense part: {compiled}")
        else:
            programs = with_fewest_items(compiled, split, formats.files[0].forward, inputs)
            part = msgspec.structs.replace(part, user_side=programs.side)
    return CompiledDensePart(
        formats, part, dense_model.request, inputs, trained_scores, eager_scores, notes, programs
    )


def compare_scores(scored: CompiledDensePart, answer: ByFeature) -> DensePart:
    """The dense part with the differences between served scores and those of the trained model.

    Args:
        scored: the compiled dense part.
        answer: of the published files to its request, by feature; float32 or float16, [B, dim] or [n, dim].
    """
    inputs = with_embeddings(scored.inputs, answer)
    with torch.no_grad():
        tensors = scored.formats.forward(*inputs.tensors(scored.part.jagged))
    outputs = []
    for output, tensor in zip(scored.part.outputs, tensors, strict=True):
        numbers = tensor.numpy()
        if scored.trained_scores is None:  # the scale was measured with random embeddings
            parity = msgspec.structs.replace(output.parity, scale=scale_of(numbers))
        else:
            off = differences(numbers, scored.trained_scores[output.name])
            parity = msgspec.structs.replace(output.parity, trained=float(off.max()), trained_mean=float(off.mean()))
        outputs.append(msgspec.structs.replace(output, parity=parity))
    return msgspec.structs.replace(scored.part, outputs=tuple(outputs))


def save_scores(scored: CompiledDensePart, directory: Path) -> None:
    """Write the files of a dense part to `directory`."""
    for compiled in scored.formats.files:
        (directory / compiled.file.name).write_bytes(compiled.content)
    if scored.user_side is not None:
        names = {USER_SIDE_NAMES: msgspec.json.encode(scored.user_side.side.names)}
        (directory / USER_PROGRAM).write_bytes(scored.user_side.user.save_to_buffer(_extra_files=names))
        (directory / ITEMS_PROGRAM).write_bytes(scored.user_side.items.save_to_buffer())


def _expect_no_key_names(dense_model: DenseModel, manifest: Manifest) -> None:
    for dense in dense_model.dense_inputs:
        if dense.name in manifest.keys:
            raise ModelError(
                f"{type(dense_model.model).__name__}: dense input {dense.name!r}: expected a name that no key has: "
                "rename it in the forward"
            )


def _eager_scores(model: nn.Module, subgraph: DenseSubgraph, inputs: DenseInputs) -> dict[str, Numbers]:
    """What the model itself answers to ids and dense inputs, by output."""
    with torch.no_grad(), evaluating(model), looking_up(model), quiet():
        answer = subgraph.eager_answer(model, inputs.copied())
    return {name: as_served(tensor).cpu().numpy() for name, tensor in answer.items()}


def _trained_scores(
    model: nn.Module, subgraph: DenseSubgraph, columns: Collections, inputs: DenseInputs
) -> tuple[DenseInputs, dict[str, Numbers]]:
    """The inputs with the embeddings and rows that the model itself looks up, and what it answers, by output."""
    looked_up: dict[nn.Module, Any] = {}
    failure = "its forward fails for ids of all features, and dense inputs in [0, 1)"
    with record_answers(columns, looked_up), model_errors(subgraph.model_name, failure):
        scores = _eager_scores(model, subgraph, inputs)
    embeddings = inputs.embeddings.clone()
    rows = {**inputs.rows}
    for collection, answer in looked_up.items():  # a collection that the forward does not call is not in it
        own_columns = columns[collection]
        if is_sequence(collection):
            for feature, name in zip(own_columns.features, own_columns.names, strict=True):
                rows[feature] = answer[name].values().float().cpu()
            continue
        pooled = answer.values().split(answer.length_per_key(), dim=1)
        for (first, last), numbers in zip(own_columns.spans, pooled, strict=True):
            embeddings[:, first:last] = numbers
    return replace(inputs, embeddings=embeddings, rows=rows), scores


def _expect_parity(
    model: nn.Module,
    subgraph: DenseSubgraph,
    module: fx.GraphModule,
    columns: Collections,
    run: Run,
    probes: Sequence[DenseInputs],
    variations: Sequence[tuple[str, DenseInputs]],
) -> None:
    """Refuse a model that answers differently than its dense part, or draws random numbers.

    Only a model with an example has `variations` of it.
    """
    requests = [request for _, request in variations]
    with RandomDraws() as draws:
        answers = eager_answers(model, subgraph, module, columns, probes, requests)
    if not variations:  # torch.fx runs nodes without inputs while it traces, and keeps their numbers as constants
        draws.expect_none(model)
    for probe, eager in zip(probes, answers, strict=False):
        if eager is not None:
            expect_model_scores(subgraph.model_name, eager, run, probe, is_usual=probe is probes[0])
    for (variation, request), eager in zip(variations, answers[len(probes) :], strict=True):
        for _, scores in run_probes(run, [request]):
            if eager is not None:
                expect_variation_scores(subgraph.model_name, variation, eager, scores)


def _without_writes(module: fx.GraphModule, subgraph: DenseSubgraph, inputs: DenseInputs) -> fx.GraphModule:
    """A dense part that does not write to its inputs, and makes no copies that it does not need."""
    merged = merge_adjacent_columns(module, inputs.embeddings.shape[1])
    tensors = inputs.tensors(subgraph.jagged)
    if not writes_to_inputs(merged, tensors):
        return merged
    if writes_to_inputs(module, tensors):
        copy_inputs(module)
    return module


def _mixed_by(
    trace: DenseTrace,
    subgraph: DenseSubgraph,
    dtype: DenseDtype,
    scripted: "torch.jit.ScriptModule | None",
    *,
    is_own: bool,
) -> str | None:
    """The first operator that may mix samples, or None.

    Args:
        trace: the dense part in FP32.
        subgraph: names its outputs.
        dtype: of the weights that serve.
        scripted: what TorchScript compiled. None: the exported program serves.
        is_own: whether it is a module of the user's own.
    """
    if dtype is DenseDtype.INT8 and any(isinstance(layer, nn.Linear) for layer in trace.module.modules()):
        return "INT8, which quantizes what an nn.Linear takes by the range that it has in a batch"
    by_id = {
        number: subgraph.by_id[name] for number, name in enumerate(subgraph.output_names) if name in subgraph.by_id
    }
    if not is_own:
        return find_opaque_step(trace.module) or find_mixing(trace, None, by_id)
    branch = None if scripted is None else find_branch(scripted)
    return branch or find_mixing(trace, scripted, by_id)


def _keys_of_equal_lengths(part: DensePart, manifest: Manifest, inputs: DenseInputs) -> tuple[tuple[str, ...], ...]:
    """The groups of keys with the same number of ids in each sample.

    Either the dense part takes something of these keys, or the forward passes the lengths of one for another.
    """
    keys = manifest.key_of_feature
    used = [part.key_of(jagged, keys) for jagged in part.jagged]
    shared = [key for pair in inputs.first.items() for key in pair if key in manifest.keys]
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys((*used, *shared)):
        groups.setdefault(inputs.key_of(key), []).append(key)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
