"""Check what a published bundle scores: together as alone, and as the model that it was exported from."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from export.errors import ModelError
from export.ids.id_maps import build_maps
from export.scores.dense_part import Scored, compare_scores, dense_part, make_dense
from export.scores.probes import allowed, largest, pieces_of, shown_to_mix
from export.trained.checkpoint import Checkpoint, open_weights
from export.trained.tables import Trained
from serving.bundle.manifest import Manifest
from serving.bundle.opening import Bundle
from serving.bundle.scores import DensePart
from serving.errors import ConfigurationError
from serving.lookup.program import DenseProgram
from serving.request.id_maps import known_of_keys
from serving.request.tensors import Array, Embeddings, Outputs


def verify_scores(
    bundle: Bundle, part: DensePart, embeddings: Embeddings, trained: Trained | None, checkpoint: Checkpoint | None
) -> tuple[DensePart, list[str]]:
    """Score a probe with the published files.

    Args:
        bundle: its digests agree.
        part: its dense part.
        embeddings: what its files answer `make_probe` with, float32 or float16 [B, D].
        trained: the model that it was exported from; None: scores are not compared with it. A dense part of the
            user's own is never compared.
        checkpoint: has the weights of `trained`; None: the model itself has them.

    Returns:
        `part` with the parity that was measured; and a line for each failure.

    Raises:
        BundleError: torch cannot load the dense part, or it is another one.
        ModelError, CheckpointError, ParityError: `trained` is no model with these scores.
    """
    program = DenseProgram(bundle, part)
    together, alone = _answers(program, embeddings)
    failures = [
        f"output {name!r}: requests that are scored together differ from each alone by {off:.3g}, expected at most "
        f"{limit:.3g}"
        for name, off, limit in _moved(part, together, alone)
        if not off <= limit
    ]
    if not failures and not part.mixes_samples and (shown := _shown_to_mix(program, embeddings)) is not None:
        failures.append(f"requests are scored together, but {shown}: export it again")
    if trained is None or part.is_own:
        return _with_merged(part, together, alone), failures
    scored = _of_model(bundle.path, bundle.manifest, part, trained, checkpoint)
    with torch.no_grad():
        answer = scored.program(torch.from_numpy(embeddings), *scored.probe)
    given = {each.name: numbers.numpy() for each, numbers in zip(part.outputs, answer, strict=True)}
    if scored.part.mixes_samples and not part.mixes_samples:
        why = f"samples may meet in {scored.part.mixed_by}"
        failures.append(f"requests are scored together, but {why}: export it again")
    failures += [
        f"output {name!r}: differs by {off:.3g} from the model given, expected at most {limit:.3g}: is this what it "
        "was exported from?"
        for name, off, limit in _moved(part, together, given)
        if not off <= limit
    ]
    return compare_scores(scored, embeddings), failures


def _answers(program: DenseProgram, embeddings: Embeddings) -> tuple[Outputs, Outputs]:
    """The scores of requests that are merged, and of each alone; by output, one request after another."""
    sizes = pieces_of(len(embeddings))
    ends = np.cumsum(sizes).tolist()
    dense = [np.split(each.numpy(), ends[:-1]) for each in make_dense(program.part.inputs, len(embeddings))]
    requests = [[column[number] for column in dense] for number in range(len(sizes))]
    together = program.score(embeddings, requests, sizes)
    alone = [
        program.score(embeddings[end - size : end], [inputs], [size])[0]
        for end, inputs, size in zip(ends, requests, sizes, strict=True)
    ]
    return _joined(together), _joined(alone)


def _shown_to_mix(program: DenseProgram, embeddings: Embeddings) -> str | None:
    """What shows that the published file lets samples meet; None: nothing was seen."""

    def run(inputs: Sequence[torch.Tensor]) -> Outputs:
        pooled, *dense = (each.numpy() for each in inputs)
        (found,) = program.score(pooled, [dense], [len(pooled)])
        return found

    dense = make_dense(program.part.inputs, len(embeddings))
    return shown_to_mix(run, [torch.from_numpy(embeddings).float(), *dense], program.part.dtype)


def _joined(answers: list[Outputs]) -> Outputs:
    return {name: np.concatenate([each[name] for each in answers]) for name in answers[0]}


def _moved(part: DensePart, found: Outputs, expected: Mapping[str, Array]) -> Iterator[tuple[str, float, float]]:
    """By how much each output differs, and by how much it may."""
    for name, numbers in found.items():
        yield name, largest(numbers, expected[name]), allowed(expected[name], part.dtype)


def _with_merged(part: DensePart, together: Outputs, alone: Outputs) -> DensePart:
    outputs = []
    for each in part.outputs:
        parity = msgspec.structs.replace(each.parity, merged=largest(together[each.name], alone[each.name]))
        outputs.append(msgspec.structs.replace(each, parity=parity))
    return msgspec.structs.replace(part, outputs=tuple(outputs))


def _of_model(
    path: Path, manifest: Manifest, part: DensePart, trained: Trained, checkpoint: Checkpoint | None
) -> Scored:
    """The dense part of `trained`, made as the published one was."""
    weights = open_weights(trained.module, trained.tables, checkpoint)
    known = known_of_keys(build_maps(trained.tables, weights).known, manifest)
    widths = {each.name: each.shape[0] for each in part.inputs}
    expected = f"{path}: expected a model with the dense inputs and outputs of this bundle, {part.contract}"
    try:
        scored = dense_part(trained, manifest, known, widths, part.dtype, checkpoint)
    except (ConfigurationError, ModelError) as error:
        raise ModelError(f"{expected}: {error}") from error
    if scored.part.contract != part.contract:
        raise ModelError(f"{expected}, got {scored.part.contract}")
    return scored
