"""Check the scores of a published bundle: merged requests against each alone, and the bundle against its model."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from export.batchability.differences import largest_difference, rounding_limit
from export.batchability.probe_mixing import probe_mixing
from export.batchability.probes import split_sizes
from export.capture.graph_inputs import DenseInputs
from export.config import Example, ExportConfig
from export.errors import ModelError, ParityError
from export.ids.id_maps import build_maps
from export.parity.fresh_process import FreshProcess
from export.scores.dense_part import CompiledDensePart, compare_scores, compile_dense_part
from export.scores.probe_inputs import ByFeature, probe_inputs, with_embeddings
from export.trained.checkpoint import Checkpoint
from export.trained.tables import Trained
from export.user_side.compile import SplitPart, difference_from_whole
from serving.bundle.load import Bundle
from serving.bundle.scores import ITEMS_PROGRAM, USER_PROGRAM, DenseFormat, DensePart, UserSide
from serving.errors import ConfigurationError
from serving.lookup.aot_inductor import misfit
from serving.lookup.dense_files import load_user_side
from serving.lookup.dense_program import DenseProgram
from serving.requests.id_maps import known_of_keys
from serving.requests.schema import scoring_schema
from serving.requests.types import Array, Outputs, Tensors
from serving.torchscript import torchscript_error


def verify_scores(
    bundle: Bundle,
    part: DensePart,
    request: Tensors,
    answer: ByFeature,
    scored: CompiledDensePart | None,
) -> tuple[DensePart, list[str]]:
    """Score a probe with the published files.

    Args:
        bundle: its files match their digests.
        part: its dense part.
        request: the probe: that of `scored`, or one from `probe_request`.
        answer: the embeddings that the bundle answers to it, by feature; float32 or float16 [B, dim] or [n, dim].
        scored: the dense part of the exported model, compiled again; None: scores are not compared with it.

    Returns:
        `part` with the measured parity, and a line for each failure.

    Raises:
        BundleError: torch cannot load the dense part, or it belongs to another bundle.
    """
    schema = scoring_schema(bundle.manifest, part)
    program = DenseProgram(bundle, schema)
    inputs = with_embeddings(
        probe_inputs(bundle.manifest, request, part) if scored is None else scored.inputs, answer
    )
    merged, alone = _scores_merged_and_alone(program, inputs)
    failures = [
        f"output {name!r}: scores of merged requests differ from those of each request alone by {error:.3g}, "
        f"expected at most {limit:.3g}"
        for name, error, limit in _errors_beyond_rounding(part, merged, alone)
    ]
    for file in part.files_by_speed:
        if file == program.loaded.file or misfit(file):
            continue
        if file.format is DenseFormat.TORCHSCRIPT and torchscript_error():
            continue
        scores = _scores(DenseProgram(bundle, schema, file), inputs)
        failures += [
            f"output {name!r}: {file.name} differs by {error:.3g} from {program.loaded.file.name}, expected at most "
            f"{limit:.3g}"
            for name, error, limit in _errors_beyond_rounding(part, scores, _scores(program, inputs))
        ]
    if not failures and not part.mixes_samples:
        key_of_output = {output.name: output.key for output in part.outputs if output.key is not None}
        mixing = probe_mixing(partial(_scores, program), inputs, part.dtype, key_of_output)
        if mixing is not None:
            failures.append(f"requests are merged, but {mixing}: export it again")
    if part.user_side is not None:
        failures += _failures_of_user_side(bundle, part, part.user_side, program, inputs)
    if scored is None:
        return _with_merged(part, merged, alone), failures
    with torch.no_grad():
        tensors = scored.formats.forward(*inputs.tensors(part.jagged))
    of_model = {output.name: scores.numpy() for output, scores in zip(part.outputs, tensors, strict=True)}
    if scored.part.mixes_samples and not part.mixes_samples:
        failures.append(f"requests are merged, but samples may meet in {scored.part.mixed_by}: export it again")
    failures += [
        f"output {name!r}: differs by {error:.3g} from the model's, expected at most {limit:.3g}: is this the model "
        "that was exported?"
        for name, error, limit in _errors_beyond_rounding(part, merged, of_model)
    ]
    return compare_scores(scored, answer), failures


def _failures_of_user_side(
    bundle: Bundle, part: DensePart, side: UserSide, program: DenseProgram, inputs: DenseInputs
) -> Iterator[str]:
    """A line if many items of one user get other scores than the whole dense part has for them."""
    if torchscript_error():
        return
    user, items = load_user_side(bundle)
    split = SplitPart.of(part, side.names, bundle.manifest)
    difference = difference_from_whole(user, items, split, partial(_scores, program), [inputs])
    if difference is not None:
        yield f"{USER_PROGRAM} and {ITEMS_PROGRAM}: {difference}: export it again"


def expect_reloaded_scores(scored: CompiledDensePart, directory: Path, fresh: FreshProcess) -> None:
    """Check that another process can load and run each file of a dense part.

    Args:
        scored: the compiled dense part.
        directory: of the files.
        fresh: the process.

    Raises:
        ParityError: it cannot load a file, or its scores differ.
    """
    part = scored.part
    tensors = scored.inputs.tensors(part.jagged)
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in scored.formats.forward(*(tensor.clone() for tensor in tensors))]
    for file in part.files_by_speed:
        answer = fresh.scores(directory / file.name, file.format, [tensor.numpy() for tensor in tensors])
        for output, numbers, reloaded in zip(part.outputs, expected, answer, strict=True):
            difference = largest_difference(reloaded, numbers)
            if not difference <= rounding_limit(numbers, part.dtype):
                raise ParityError(
                    f"{directory / file.name}: output {output.name!r}: a fresh process answers differently, by "
                    f"{difference:.3g}"
                )


def _scores_merged_and_alone(program: DenseProgram, inputs: DenseInputs) -> tuple[Outputs, Outputs]:
    """Split inputs into requests, and score them merged, and each alone. Both by output, in the order of requests."""
    sizes = split_sizes(inputs.samples)
    requests = [inputs.select(samples) for samples in torch.split(torch.arange(inputs.samples), sizes)]
    arrays = [[tensor.numpy() for tensor in request.tensors(program.part.jagged)[1:]] for request in requests]
    merged = program.score(inputs.embeddings.numpy(), arrays, sizes)
    return _concatenated(merged), _concatenated([_scores(program, request) for request in requests])


def _scores(program: DenseProgram, inputs: DenseInputs) -> Outputs:
    """Score one request."""
    embeddings, *arrays = (tensor.numpy() for tensor in inputs.tensors(program.part.jagged))
    (scores,) = program.score(embeddings, [arrays], [inputs.samples])
    return scores


def _concatenated(answers: list[Outputs]) -> Outputs:
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


def _errors_beyond_rounding(
    part: DensePart, scores: Outputs, expected: Mapping[str, Array]
) -> Iterator[tuple[str, float, float]]:
    """The outputs that differ by more than rounding explains: the name, its error and the limit."""
    for name, numbers in scores.items():
        error, limit = largest_difference(numbers, expected[name]), rounding_limit(expected[name], part.dtype)
        if not error <= limit:  # also NaN
            yield name, error, limit


def _with_merged(part: DensePart, merged: Outputs, alone: Outputs) -> DensePart:
    """`part` with the difference between merged requests and each alone as its parity."""
    outputs = []
    for output in part.outputs:
        error = largest_difference(merged[output.name], alone[output.name])
        parity = msgspec.structs.replace(output.parity, merged=error)
        outputs.append(msgspec.structs.replace(output, parity=parity))
    return msgspec.structs.replace(part, outputs=tuple(outputs))


def scored_of(
    bundle: Bundle,
    part: DensePart,
    trained: Trained,
    weights: Checkpoint,
    is_saved: bool,
    example: Example | None,
) -> CompiledDensePart:
    """Compile the dense part of a model again, as the export of the bundle did.

    Args:
        bundle: the bundle.
        part: its dense part, which the export took from the model (`DensePart.is_own` is false).
        trained: the model.
        weights: its tables.
        is_saved: whether the tables are in a checkpoint rather than in the model.
        example: a call of the model; None: it was exported without one.

    Raises:
        ModelError, CheckpointError, ParityError: the model does not have these scores.
    """
    path, manifest = bundle.path, bundle.manifest
    known_ids = known_of_keys(build_maps(trained.tables, weights).known, manifest)
    checkpoint = weights if is_saved else None
    widths = {} if example is not None else {dense.name: dense.shape[0] for dense in part.inputs if dense.shape}
    expected = f"{path}: expected a model with the dense inputs and outputs of this bundle, {part.schema}"
    try:
        config = ExportConfig(scores=True, dense_dtype=part.dtype, dense_widths=widths, example=example)
        scored = compile_dense_part(trained, manifest, known_ids, config, checkpoint)
    except (ConfigurationError, ModelError) as error:
        raise ModelError(f"{expected}: {error}") from error
    if scored.part.schema != part.schema:
        raise ModelError(f"{expected}, got {scored.part.schema}")
    return scored
