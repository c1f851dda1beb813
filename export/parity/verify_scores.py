"""Check what a published bundle scores: together as alone, and as the model that it was exported from."""

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
from export.config import Example
from export.errors import ModelError, ParityError
from export.ids.id_maps import build_maps
from export.parity.fresh_process import FreshProcess
from export.scores.dense_part import CompiledDensePart, compare_scores, compile_dense_part
from export.scores.probe_inputs import ByFeature, probe_inputs, with_embeddings
from export.trained.checkpoint import Checkpoint
from export.trained.tables import Trained
from serving.bundle.load import Bundle
from serving.bundle.scores import DenseFormat, DensePart
from serving.errors import ConfigurationError
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
        bundle: its digests agree.
        part: its dense part.
        request: of `scored`, or as `probe_request` makes it.
        answer: what its files answer to it, by feature; float32 or float16 [B, dim] or [n, dim].
        scored: the dense part of the model that it was exported from; None: scores are not compared with it.

    Returns:
        `part` with the parity that was measured; and a line for each failure.

    Raises:
        BundleError: torch cannot load the dense part, or it is another one.
    """
    schema = scoring_schema(bundle.manifest, part)
    program = DenseProgram(bundle, schema)
    given = with_embeddings(probe_inputs(bundle.manifest, request, part) if scored is None else scored.inputs, answer)
    together, alone = _answers(program, given)
    failures = [
        f"output {name!r}: requests that are scored together differ from each alone by {off:.3g}, expected at most "
        f"{limit:.3g}"
        for name, off, limit in _moved(part, together, alone)
        if not off <= limit
    ]
    for file in part.files_by_speed:
        if file == program.loaded.file or (file.format is DenseFormat.TORCHSCRIPT and torchscript_error()):
            continue
        scores = _scores(DenseProgram(bundle, schema, file), given)
        failures += [
            f"output {name!r}: {file.name} differs by {off:.3g} from {program.loaded.file.name}, expected at most "
            f"{limit:.3g}"
            for name, off, limit in _moved(part, scores, _scores(program, given))
            if not off <= limit
        ]
    if not failures and not part.mixes_samples:
        by_id = {output.name: output.key for output in part.outputs if output.key is not None}
        shown = probe_mixing(partial(_scores, program), given, part.dtype, by_id)
        if shown is not None:
            failures.append(f"requests are scored together, but {shown}: export it again")
    if scored is None:
        return _with_merged(part, together, alone), failures
    with torch.no_grad():
        answers = scored.formats.forward(*given.tensors(part.jagged))
    model = {output.name: numbers.numpy() for output, numbers in zip(part.outputs, answers, strict=True)}
    if scored.part.mixes_samples and not part.mixes_samples:
        why = f"samples may meet in {scored.part.mixed_by}"
        failures.append(f"requests are scored together, but {why}: export it again")
    failures += [
        f"output {name!r}: differs by {off:.3g} from the model given, expected at most {limit:.3g}: is this what it "
        "was exported from?"
        for name, off, limit in _moved(part, together, model)
        if not off <= limit
    ]
    return compare_scores(scored, answer), failures


def expect_reloaded_scores(scored: CompiledDensePart, directory: Path, fresh: FreshProcess) -> None:
    """Have another process load and run each file of a dense part.

    Args:
        scored: the compiled dense part.
        directory: has the files.
        fresh: the process.

    Raises:
        ParityError: it cannot load a file, or its scores are others.
    """
    part = scored.part
    tensors = scored.inputs.tensors(part.jagged)
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in scored.formats.forward(*(tensor.clone() for tensor in tensors))]
    for file in part.files_by_speed:
        answer = fresh.scores(directory / file.name, file.format, [tensor.numpy() for tensor in tensors])
        for output, numbers, others in zip(part.outputs, expected, answer, strict=True):
            difference = largest_difference(others, numbers)
            if not difference <= rounding_limit(numbers, part.dtype):
                raise ParityError(
                    f"{directory / file.name}: output {output.name!r}: a fresh process answers differently, by "
                    f"{difference:.3g}"
                )


def _answers(program: DenseProgram, given: DenseInputs) -> tuple[Outputs, Outputs]:
    """The scores of requests that are merged, and of each alone; by output, one request after another."""
    sizes = split_sizes(given.samples)
    pieces = [given.select(chosen) for chosen in torch.split(torch.arange(given.samples), sizes)]
    inputs = [[tensor.numpy() for tensor in piece.tensors(program.part.jagged)[1:]] for piece in pieces]
    together = program.score(given.embeddings.numpy(), inputs, sizes)
    return _joined(together), _joined([_scores(program, piece) for piece in pieces])


def _scores(program: DenseProgram, given: DenseInputs) -> Outputs:
    """The scores of one request."""
    embeddings, *inputs = (tensor.numpy() for tensor in given.tensors(program.part.jagged))
    (found,) = program.score(embeddings, [inputs], [given.samples])
    return found


def _joined(answers: list[Outputs]) -> Outputs:
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


def _moved(part: DensePart, found: Outputs, expected: Mapping[str, Array]) -> Iterator[tuple[str, float, float]]:
    """By how much each output differs, and by how much it may."""
    for name, numbers in found.items():
        yield name, largest_difference(numbers, expected[name]), rounding_limit(expected[name], part.dtype)


def _with_merged(part: DensePart, together: Outputs, alone: Outputs) -> DensePart:
    outputs = []
    for output in part.outputs:
        parity = msgspec.structs.replace(
            output.parity, merged=largest_difference(together[output.name], alone[output.name])
        )
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
    """The dense part of a model, made as the published one was.

    Args:
        bundle: the bundle.
        part: its dense part. It is none of the user's own.
        trained: the model.
        weights: has its tables.
        is_saved: whether they are in a checkpoint, and not in the model.
        example: of a call of the model; None: it was exported without one.

    Raises:
        ModelError, CheckpointError, ParityError: it is no model with these scores.
    """
    path, manifest = bundle.path, bundle.manifest
    known = known_of_keys(build_maps(trained.tables, weights).known, manifest)
    checkpoint = weights if is_saved else None
    widths = {} if example is not None else {input_.name: input_.shape[0] for input_ in part.inputs if input_.shape}
    expected = f"{path}: expected a model with the dense inputs and outputs of this bundle, {part.schema}"
    try:
        scored = compile_dense_part(trained, manifest, known, widths, part.dtype, checkpoint, example=example)
    except (ConfigurationError, ModelError) as error:
        raise ModelError(f"{expected}: {error}") from error
    if scored.part.schema != part.schema:
        raise ModelError(f"{expected}, got {scored.part.schema}")
    return scored
