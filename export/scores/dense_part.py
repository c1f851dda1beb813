"""The dense part of a trained model: cut out, given its weights, compiled, and compared with the model itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from export.errors import ModelError, ParityError, compiler_line
from export.rows.table_error import finite
from export.scores.apart import what_branches, what_is_one_step, what_mixes_samples
from export.scores.cut import Columns, Cut, changes_inputs, cut, keep_inputs
from export.scores.dense_inputs import inputs_of, with_dtype, with_weights
from export.scores.eager_model import answers_behind, model_errors
from export.scores.probes import Numbers, Run, allowed, answered, largest, pieces_of, scale_of, scaled, shown_to_mix
from export.scores.trace import WAY_OUT, not_tensors, tensors_of
from export.scores.user_dense import around
from export.trained.checkpoint import Checkpoint
from export.trained.keyed import line_of
from export.trained.managed import inner_of, is_sequence, looking_up
from export.trained.probe import kjt_of, listening, make_probe
from export.trained.running import evaluating, quiet
from export.trained.tables import Trained
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseDtype, DenseInput, DensePart, InputDtype, ScoreOutput, ScoreParity
from serving.lookup.program import torchscript
from serving.request.tensors import Ids, Tensors


@dataclass(frozen=True, slots=True)
class Scored:
    """A dense part that is ready to be written.

    Attributes:
        program: compiled, for the dtype that serves.
        part: for the manifest. Its parity lacks `trained`.
        probe: dense inputs, float32 [B, width] each, for the samples of `make_probe`.
        trained: what the trained model answers that probe with, by output; None where it could not be run.
        answer: what the trained model answers to ids of all features and its dense inputs, by output; None likewise.
    """

    program: torch.jit.ScriptModule
    part: DensePart
    probe: tuple[Tensor, ...]
    trained: Mapping[str, Numbers] | None
    answer: Callable[[KeyedJaggedTensor, Sequence[Tensor]], dict[str, Numbers]] | None


def dense_part(
    trained: Trained,
    manifest: Manifest,
    known: Mapping[str, Ids],
    widths: Mapping[str, int],
    dtype: DenseDtype,
    checkpoint: Checkpoint | None,
    own: nn.Module | None = None,
) -> Scored:
    """Cut the dense part out of a trained model, compile it, and compare it with the model.

    Args:
        trained: the model and its collections.
        manifest: features and tables of the bundle.
        known: ids of each key with a map.
        widths: of dense inputs that no nn.Linear takes, by name.
        dtype: of its weights.
        checkpoint: has its weights; None: the model itself has them.
        own: takes the place of what follows the collections, with its own weights. It is not compared with the model.

    Raises:
        ModelError: the model cannot be cut or compiled, or answers otherwise than with tensors [B, …].
        ConfigurationError: the width of an input is not known.
        CheckpointError: a weight is missing.
        ParityError: what was cut out answers otherwise than the model.
    """
    for name, collection in trained.found.collections.items():
        if is_sequence(collection):
            raise ModelError(
                f"{name} ({type(collection).__name__}): scores are made of embeddings that are pooled: those of "
                "sequences are not served yet: export without --scores"
            )
    columns = {trained.found.collections[path]: these for path, these in _columns(trained, manifest).items()}
    if own is None:
        path, entry = _entry(trained)
        found = cut(entry, columns)
    else:
        path, entry, checkpoint = "", own, None
        found = around(own, _spans(manifest), widths)
    inputs = inputs_of(found, widths)
    if keys := [each.name for each in inputs if each.name in manifest.keys]:
        raise ModelError(
            f"{type(entry).__name__}: dense input {keys[0]!r}: expected a name that no key has: rename it in the "
            "forward"
        )
    request = make_probe(manifest, known)
    samples = request.lengths.size // len(manifest.keys)
    dense = make_dense(inputs, samples)
    width = sum(table.dim for table in manifest.feature_tables)
    pooled = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    own_answers: Mapping[str, Numbers] | None = None
    answer = None
    if own is None and checkpoint is None:
        answer = partial(_own_answer, entry, found)
        pooled, own_answers = _answers_of_model(entry, found, columns, manifest, request, dense)
    module = with_weights(found, path, checkpoint)
    run = partial(_run, entry, module, found.outputs)
    probes = [(pooled, *dense), *(probe for probe, _ in answered(run, scaled([pooled, *dense])))]
    if own is None:
        ids = kjt_of(manifest, request, torch.device("cpu"))
        expected = answers_behind(entry, found, module, columns, ids, probes)
        for probe, each in zip(probes, expected, strict=True):
            _check_cut(entry, each, run(probe))
    if changes_inputs(module, pooled, dense):
        keep_inputs(module)
    program = _compiled(entry, module, dtype)
    serve = partial(_run, entry, program, found.outputs)
    outputs = _compared(entry, run, serve, probes, dtype)
    if dtype is DenseDtype.INT8 and any(isinstance(each, nn.Linear) for each in module.modules()):
        mixed_by: str | None = "INT8, which quantizes what an nn.Linear takes by the range that it has in a batch"
    else:
        mixed_by = what_is_one_step(module) if own is None else what_branches(program)
        mixed_by = mixed_by or what_mixes_samples(module, probes[0], None if own is None else program)
        mixed_by = mixed_by or shown_to_mix(serve, probes[0], dtype)
    part = DensePart(
        inputs, outputs, dtype, mixes_samples=mixed_by is not None, mixed_by=mixed_by, is_own=own is not None
    )
    return Scored(program, part, dense, own_answers, answer)


def compare_scores(scored: Scored, answer: npt.NDArray[Any]) -> DensePart:
    """The dense part with how far served scores are from those of the trained model.

    Args:
        scored: what was compiled.
        answer: of the published files to `make_probe`, float32 or float16 [B, D].
    """
    if scored.trained is None:
        return scored.part
    names = [each.name for each in scored.part.outputs]
    with torch.no_grad():
        found = scored.program(torch.from_numpy(answer), *scored.probe)
    served = {name: each.numpy() for name, each in zip(names, found, strict=True)}
    outputs = []
    for each in scored.part.outputs:
        ours, theirs = finite(served[each.name], scored.trained[each.name])
        moved = np.abs(ours - theirs)
        parity = msgspec.structs.replace(each.parity, trained=float(moved.max()), trained_mean=float(moved.mean()))
        outputs.append(msgspec.structs.replace(each, parity=parity))
    return msgspec.structs.replace(scored.part, outputs=tuple(outputs))


def make_dense(inputs: Sequence[DenseInput], samples: int) -> tuple[Tensor, ...]:
    """Seeded dense inputs beside `make_probe`, [B, *shape] each: FP32 within [0, 1), the others 0 or 1."""
    generator = torch.Generator().manual_seed(0)

    def make(of: DenseInput) -> Tensor:
        if of.dtype is InputDtype.FP32:
            return torch.rand(samples, *of.shape, generator=generator)
        integers = torch.randint(0, 2, (samples, *of.shape), generator=generator)
        return torch.from_numpy(integers.numpy().astype(of.dtype.numpy))

    return tuple(make(each) for each in inputs)


def save_scores(program: torch.jit.ScriptModule, path: Path) -> None:
    """Write a dense part to `path`."""
    path.write_bytes(program.save_to_buffer())


def _entry(trained: Trained) -> tuple[str, nn.Module]:
    """The model around the collections, and its path in the module that was given."""
    entries = [each.module for each in trained.found.entries]
    if len(entries) != 1 or entries[0] in trained.found.collections.values():
        found = ", ".join(type(each).__name__ for each in entries)
        raise ModelError(
            f"{type(trained.module).__name__}: expected one module around all collections, with scores, found "
            f"{found}: give that module, or export without --scores"
        )
    (path,) = (name for name, each in trained.module.named_modules() if each is entries[0])
    return path, entries[0]


def _columns(trained: Trained, manifest: Manifest) -> dict[str, Columns]:
    """Where the answers of each collection are in those of the bundle, by the collection's path."""
    spans = _spans(manifest)
    found = {}
    for path, own in trained.by_collection.items():
        _, inner = inner_of(trained.found.collections[path])
        names = [name for each in get_embedding_names_by_table(inner.embedding_bag_configs()) for name in each]
        found[path] = Columns(names, [spans[name] for table in own for name in table.features])
    return found


def _spans(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """The columns of each feature in the answers of a bundle, [first, last)."""
    dims = [table.dim for table in manifest.feature_tables]
    ends = np.cumsum(dims).tolist()
    return {feature.name: (end - dim, end) for feature, dim, end in zip(manifest.features, dims, ends, strict=True)}


def _answers_of_model(
    entry: nn.Module,
    found: Cut,
    columns: Mapping[nn.Module, Columns],
    manifest: Manifest,
    request: Tensors,
    dense: Sequence[Tensor],
) -> tuple[Tensor, dict[str, Numbers]]:
    """What the model's collections answer, float32 [B, D], and what the model answers, by output."""
    heard: dict[nn.Module, Any] = {}
    hearing = listening(columns, heard)
    with hearing, model_errors(entry, "its forward fails for ids of all features, and dense inputs in [0, 1)"):
        answer = _own_answer(entry, found, kjt_of(manifest, request, torch.device("cpu")), dense)
    width = sum(table.dim for table in manifest.feature_tables)
    pooled = torch.empty(request.lengths.size // len(manifest.keys), width)
    for collection, these in columns.items():
        answered = heard[collection]
        pieces = answered.values().split(answered.length_per_key(), dim=1)
        for (first, last), piece in zip(these.spans, pieces, strict=True):
            pooled[:, first:last] = piece
    return pooled, answer


def _own_answer(entry: nn.Module, found: Cut, ids: KeyedJaggedTensor, dense: Sequence[Tensor]) -> dict[str, Numbers]:
    """What the model itself answers, by output, to ids and dense inputs [B, width] that are on the CPU."""
    with torch.no_grad(), evaluating(entry), looking_up(entry), quiet():
        ids = ids.to(next(entry.parameters()).device)
        inputs = {name: each.to(ids.device()).clone() for name, each in zip(found.inputs, dense, strict=True)}
        answer = entry(**dict.fromkeys(found.ids, ids), **inputs)
    tensors = tensors_of(answer)
    if list(tensors) != list(found.outputs):
        raise not_tensors(entry, type(answer).__name__)
    return {name: each.float().cpu().numpy() for name, each in tensors.items()}


def _check_cut(entry: nn.Module, model: Mapping[str, Tensor], cut_out: Mapping[str, Numbers]) -> None:
    for name, numbers in ((name, each.numpy()) for name, each in model.items()):
        if largest(cut_out[name], numbers) > allowed(numbers, DenseDtype.FP32):
            raise ParityError(
                f"{type(entry).__name__}: output {name!r}: what follows the collections answers otherwise than the "
                f"model, by {largest(cut_out[name], numbers):.3g}: something that a graph of its forward does not "
                f"have changes it, such as a hook, autocast, random numbers, or += on a part of a tensor: {WAY_OUT}"
            )


def _run(entry: nn.Module, module: nn.Module, outputs: Sequence[str], inputs: Sequence[Tensor]) -> dict[str, Numbers]:
    """The outputs of a dense part, by name."""
    device, samples = next((each.device for each in module.parameters()), torch.device("cpu")), len(inputs[0])
    what = f"its forward cannot be run for {samples} samples behind its collections"
    with torch.no_grad(), quiet(), model_errors(entry, what):
        answer = module(*(each.to(device).clone() for each in inputs))
    for name, each in zip(outputs, answer, strict=True):
        if each.ndim == 0 or len(each) != samples:
            raise ModelError(
                f"{type(entry).__name__}: output {name!r}: expected shape [{samples}, …] for {samples} samples, got "
                f"{list(each.shape)}: {WAY_OUT}"
            )
    return {name: each.cpu().numpy() for name, each in zip(outputs, answer, strict=True)}


def _compared(
    entry: nn.Module, run: Run, serve: Run, probes: Sequence[Sequence[Tensor]], dtype: DenseDtype
) -> tuple[ScoreOutput, ...]:
    """The outputs, with their parity for the first probe.

    Raises:
        ParityError: compiled, a dense part with weights in FP32 answers otherwise.
    """
    found = [(run(probe), serve(probe)) for probe in probes]
    for exact, served in found if dtype is DenseDtype.FP32 else found[:1]:
        for name, numbers in exact.items():
            limit = allowed(numbers, dtype) if dtype is DenseDtype.FP32 else np.finfo(np.float32).max
            if not (off := largest(served[name], numbers)) <= limit:
                raise ParityError(
                    f"{type(entry).__name__}: output {name!r}: compiled, it is off by {off:.3g}, where the largest "
                    f"is {scale_of(numbers):.3g}"
                )
    (exact, served), sizes = found[0], pieces_of(len(probes[0][0]))
    pieces = [serve(piece) for piece in zip(*(torch.split(each, sizes) for each in probes[0]), strict=True)]
    outputs = []
    for name, numbers in exact.items():
        alone = np.concatenate([piece[name] for piece in pieces])
        parity = ScoreParity(scale_of(numbers), largest(served[name], numbers), largest(served[name], alone))
        outputs.append(ScoreOutput(name, numbers.shape[1:], parity))
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
