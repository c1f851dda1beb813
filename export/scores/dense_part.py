"""The dense part of a trained model: cut out, given its weights, compiled, and compared with the model itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from export.capture.bags import Bags, bags_of
from export.capture.given import Given
from export.capture.signature import Collections, Columns
from export.config import Example
from export.errors import ModelError, ParityError, compiler_line
from export.rows.table_error import finite
from export.scores.apart import what_branches, what_is_one_step, what_mixes_samples
from export.scores.cut import Cut, changes_inputs, cut, keep_inputs
from export.scores.cut_example import follow_example
from export.scores.dense_inputs import inputs_of, with_dtype, with_weights
from export.scores.eager_model import answers_behind, model_errors
from export.scores.other_requests import other_requests
from export.scores.probes import Numbers, Run, allowed, answered, largest, pieces_of, scale_of, scaled, shown_to_mix
from export.scores.trace import WAY_OUT
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

ByFeature = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Scored:
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
    given: Given
    trained: Mapping[str, Numbers] | None
    answer: Callable[[Given], dict[str, Numbers]] | None
    notes: tuple[str, ...] = ()


def dense_part(
    trained: Trained,
    manifest: Manifest,
    known: Mapping[str, Ids],
    widths: Mapping[str, int],
    dtype: DenseDtype,
    checkpoint: Checkpoint | None,
    own: nn.Module | None = None,
    example: Example | None = None,
) -> Scored:
    """Cut the dense part out of a trained model, compile it, and compare it with the model.

    Args:
        trained: the model and its collections.
        manifest: features and tables of the bundle.
        known: ids of each key with a map.
        widths: of dense inputs that no nn.Linear takes, by name. With an example they are those of the example.
        dtype: of its weights.
        checkpoint: has its weights; None: the model itself has them.
        own: takes the place of what follows the collections, with its own weights. It is not compared with the model.
        example: a call of the model. None: its arguments are one KJT and dense inputs [B, width].

    Raises:
        ModelError: the model cannot be cut or compiled, or answers otherwise than with tensors [B, …].
        ConfigurationError: the width of an input is not known.
        CheckpointError: a weight is missing.
        ParityError: what was cut out answers otherwise than the model.
    """
    columns = columns_of(trained, manifest)
    notes: list[str] = []
    path, entry = "", own
    if own is not None:
        _expect_pooled(trained)
        checkpoint = None
        found = around(own, _spans(manifest), widths)
        inputs = inputs_of(found, widths)
    elif example is not None:
        entry = trained.module
        followed = follow_example(entry, columns, example)
        found, inputs, notes = followed.cut(entry)
    else:
        _expect_pooled(trained)
        path, entry = _entry(trained)
        found = cut(entry, columns)
        inputs = inputs_of(found, widths)
    assert entry is not None  # noqa: S101  one of the three
    if keys := [each.name for each in inputs if each.name in manifest.keys]:
        raise ModelError(
            f"{type(entry).__name__}: dense input {keys[0]!r}: expected a name that no key has: rename it in the "
            "forward"
        )
    if example is not None and own is None:
        given = followed.given(dense=found.inputs)
        request = request_of(manifest, given.bags)
    else:
        request = request_for(manifest, None, known)
        given = given_for(manifest, request, inputs)
    own_answers: Mapping[str, Numbers] | None = None
    answer = None
    if own is None and checkpoint is None:
        answer = partial(_own_answer, entry, found)
        given, own_answers = _answers_of_model(entry, found, columns, given)
    module = with_weights(found, path, checkpoint)
    run = partial(_run, entry, module, found)
    probes = [given, *(probe for probe, _ in answered(run, scaled(given)))]
    if own is None:
        others = [] if example is None else [*other_requests(given, columns)]
        answers = answers_behind(entry, found, module, columns, probes, [each for _, each in others])
        for probe, each in zip(probes, answers, strict=False):
            _check_cut(entry, each or {}, run(probe))
        for (what, other), each in zip(others, answers[len(probes) :], strict=True):
            _check_other(entry, what, each, next((own for _, own in answered(run, [other])), None))
    if changes_inputs(module, given.tensors(found.jagged)):
        keep_inputs(module)
    program = _compiled(entry, module, dtype)
    serve = partial(_run, entry, program, found)
    outputs = _compared(entry, run, serve, probes, dtype)
    if dtype is DenseDtype.INT8 and any(isinstance(each, nn.Linear) for each in module.modules()):
        mixed_by: str | None = "INT8, which quantizes what an nn.Linear takes by the range that it has in a batch"
    else:
        mixed_by = what_is_one_step(module) if own is None else what_branches(program)
        mixed_by = mixed_by or what_mixes_samples(module, given, found.jagged, None if own is None else program)
        mixed_by = mixed_by or shown_to_mix(serve, given, dtype)
    part = DensePart(
        inputs,
        outputs,
        dtype,
        mixes_samples=mixed_by is not None,
        mixed_by=mixed_by,
        is_own=own is not None,
        jagged=found.jagged,
        fixed_lengths={key: count for key, count in given.fixed.items() if key in manifest.keys},
    )
    return Scored(program, part, request, given, own_answers, answer, tuple(notes))


def compare_scores(scored: Scored, answer: ByFeature) -> DensePart:
    """The dense part with how far served scores are from those of the trained model.

    Args:
        scored: what was compiled.
        answer: of the published files to its request, by feature; float32 or float16, [B, dim], or [n, dim].
    """
    if scored.trained is None:
        return scored.part
    given = with_answer(scored.given, answer)
    names = [each.name for each in scored.part.outputs]
    with torch.no_grad():
        found = scored.program(*given.tensors(scored.part.jagged))
    served = {name: each.numpy() for name, each in zip(names, found, strict=True)}
    outputs = []
    for each in scored.part.outputs:
        ours, theirs = finite(served[each.name], scored.trained[each.name])
        moved = np.abs(ours - theirs)
        parity = msgspec.structs.replace(each.parity, trained=float(moved.max()), trained_mean=float(moved.mean()))
        outputs.append(msgspec.structs.replace(each, parity=parity))
    return msgspec.structs.replace(scored.part, outputs=tuple(outputs))


def with_answer(given: Given, answer: ByFeature) -> Given:
    """What is given, with embeddings and rows of an answer to its request, by feature."""
    pooled = [each for name, each in answer.items() if name not in given.keys]
    embeddings = np.concatenate(pooled, axis=1) if pooled else np.zeros((given.samples, 0), np.float32)
    rows = {name: torch.from_numpy(answer[name]) for name in given.rows}
    return replace(given, embeddings=torch.from_numpy(embeddings), rows=rows)


def request_of(manifest: Manifest, bags: Bags) -> Tensors:
    """A request for all keys."""
    own = [bags[key] for key in manifest.keys]
    values = torch.cat([each.ids for each in own]).long().numpy()
    lengths = torch.cat([each.lengths for each in own]).int().numpy()
    if not manifest.weighted:
        return Tensors(None, values, lengths)
    weights = [torch.ones(len(each.ids)) if each.weights is None else each.weights.float() for each in own]
    return Tensors(None, values, lengths, torch.cat(weights).numpy())


def make_dense(inputs: Sequence[DenseInput], samples: int) -> tuple[Tensor, ...]:
    """Seeded dense inputs beside `make_probe`, [B, *shape] each: FP32 within [0, 1), the others 0 or 1."""
    generator = torch.Generator().manual_seed(0)

    def make(of: DenseInput) -> Tensor:
        if of.dtype is InputDtype.FP32:
            return torch.rand(samples, *of.shape, generator=generator)
        integers = torch.randint(0, 2, (samples, *of.shape), generator=generator)
        return torch.from_numpy(integers.numpy().astype(of.dtype.numpy))

    return tuple(make(each) for each in inputs)


def request_for(manifest: Manifest, part: DensePart | None, known: Mapping[str, Ids]) -> Tensors:
    """A request for scores, where no example of a call is known.

    A model that takes ids or rows may take no more ids of a key than it was trained with: there is one in each bag.

    Args:
        manifest: of the bundle.
        part: its dense part; None: of a model whose scores are made of pooled embeddings.
        known: ids of each key with a map.
    """
    if part is None or not part.jagged:
        return make_probe(manifest, known)
    keys = {feature.name: feature.key for feature in manifest.features}
    ones = {keys.get(each.name, each.name): 1 for each in part.jagged}
    return make_probe(manifest, known, ones | part.fixed_lengths)


def given_for(manifest: Manifest, request: Tensors, part: DensePart | Sequence[DenseInput]) -> Given:
    """What a dense part is given beside a request, with random embeddings and rows.

    Args:
        manifest: of the bundle.
        request: for all keys.
        part: the dense part; or the dense inputs of one that takes nothing else.
    """
    inputs, fixed = (part.inputs, part.fixed_lengths) if isinstance(part, DensePart) else (part, {})
    generator = torch.Generator().manual_seed(0)
    samples = request.lengths.size // len(manifest.keys)
    bags = bags_of(kjt_of(manifest, request, torch.device("cpu")))
    width, rows, keys = 0, dict[str, Tensor](), dict[str, str]()
    for feature, table in zip(manifest.features, manifest.feature_tables, strict=True):
        if table.is_sequence:
            keys[feature.name] = feature.key
            rows[feature.name] = torch.randn(len(bags[feature.key].ids), table.dim, generator=generator)
        else:
            width += table.dim
    embeddings = torch.randn(samples, width, generator=generator)
    return Given(embeddings, make_dense(inputs, samples), bags, rows, keys, fixed)


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


def _expect_pooled(trained: Trained) -> None:
    for name, collection in trained.found.collections.items():
        if is_sequence(collection):
            raise ModelError(
                f"{name} ({type(collection).__name__}): scores are made of rows that are not pooled: give an example "
                "of a call: export_model(example=(…)), --example package.module:function"
            )


def columns_of(trained: Trained, manifest: Manifest) -> dict[nn.Module, Columns]:
    """Where the answers of each collection are in those of the bundle."""
    spans, dims = (
        _spans(manifest),
        {each.name: table.dim for each, table in zip(manifest.features, manifest.feature_tables, strict=True)},
    )
    found = {}
    for path, own in trained.by_collection.items():
        collection = trained.found.collections[path]
        _, inner = inner_of(collection)
        configs = inner.embedding_configs() if is_sequence(collection) else inner.embedding_bag_configs()
        features = [name for table in own for name in table.features]
        found[collection] = Columns(
            names=[name for each in get_embedding_names_by_table(configs) for name in each],
            features=features,
            keys=[key for table in own for key in table.keys],
            dims=[dims[name] for name in features],
            spans=[] if is_sequence(collection) else [spans[name] for name in features],
        )
    return found


def _spans(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """The columns of each pooled feature in the embeddings of a request, [first, last)."""
    pooled = [
        (feature.name, table.dim)
        for feature, table in zip(manifest.features, manifest.feature_tables, strict=True)
        if not table.is_sequence
    ]
    ends = np.cumsum([dim for _, dim in pooled]).tolist()
    return {name: (end - dim, end) for (name, dim), end in zip(pooled, ends, strict=True)}


def _answers_of_model(
    entry: nn.Module, found: Cut, columns: Collections, given: Given
) -> tuple[Given, dict[str, Numbers]]:
    """What is given, with the embeddings and rows of the model itself; and what the model answers, by output."""
    heard: dict[nn.Module, Any] = {}
    hearing = listening(columns, heard)
    with hearing, model_errors(entry, "its forward fails for ids of all features, and dense inputs in [0, 1)"):
        answer = _own_answer(entry, found, given)
    pooled = torch.empty(given.samples, given.embeddings.shape[1])
    rows: dict[str, Tensor] = {}
    for collection, these in columns.items():
        answered = heard[collection]
        if is_sequence(collection):
            named = zip(these.features, these.names, strict=True)
            rows |= {feature: answered[name].values().float().cpu() for feature, name in named}
            continue
        pieces = answered.values().split(answered.length_per_key(), dim=1)
        for (first, last), piece in zip(these.spans, pieces, strict=True):
            pooled[:, first:last] = piece
    return replace(given, embeddings=pooled, rows=rows), answer


def _own_answer(entry: nn.Module, found: Cut, given: Given) -> dict[str, Numbers]:
    """What the model itself answers, by output, to ids and dense inputs."""
    with torch.no_grad(), evaluating(entry), looking_up(entry), quiet():
        answer = found.answer(entry, given.copied())
    return {name: each.float().cpu().numpy() for name, each in answer.items()}


def _check_cut(entry: nn.Module, model: Mapping[str, Tensor], cut_out: Mapping[str, Numbers]) -> None:
    for name, numbers in ((name, each.numpy()) for name, each in model.items()):
        if largest(cut_out[name], numbers) > allowed(numbers, DenseDtype.FP32):
            raise ParityError(
                f"{type(entry).__name__}: output {name!r}: what follows the collections answers otherwise than the "
                f"model, by {largest(cut_out[name], numbers):.3g}: something that a graph of its forward does not "
                f"have changes it, such as a hook, autocast, random numbers, or += on a part of a tensor: {WAY_OUT}"
            )


def _check_other(
    entry: nn.Module, what: str, model: Mapping[str, Tensor] | None, cut_out: Mapping[str, Numbers] | None
) -> None:
    """Refuse a model that does something else for such a request than its graph. One that cannot answer it may be."""
    for name, each in (model or {}).items() if cut_out is not None else ():
        numbers, own = each.numpy(), (cut_out or {})[name]
        if numbers.size == own.size:  # .squeeze() may have left out the dimension of one sample
            numbers = numbers.reshape(own.shape)
        if largest(own, numbers) > allowed(numbers, DenseDtype.FP32):
            raise ParityError(
                f"{type(entry).__name__}: output {name!r}: its forward does something else for a request {what}, by "
                f"{largest(own, numbers):.3g}: expected the same steps for any number of samples and ids: {WAY_OUT}"
            )


def _run(entry: nn.Module, module: nn.Module, found: Cut, given: Given) -> dict[str, Numbers]:
    """The outputs of a dense part, by name."""
    what = f"its forward cannot be run for {given.samples} samples behind its collections"
    with torch.no_grad(), quiet(), model_errors(entry, what):
        answer = module(*(each.clone() for each in given.tensors(found.jagged)))
    for name, each in zip(found.outputs, answer, strict=True):
        if each.ndim == 0 or len(each) != given.samples:
            raise ModelError(
                f"{type(entry).__name__}: output {name!r}: expected shape [{given.samples}, …] for {given.samples} "
                f"samples, got {list(each.shape)}: {WAY_OUT}"
            )
    return {name: each.cpu().numpy() for name, each in zip(found.outputs, answer, strict=True)}


def _compared(
    entry: nn.Module, run: Run, serve: Run, probes: Sequence[Given], dtype: DenseDtype
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
    (exact, served), sizes = found[0], pieces_of(probes[0].samples)
    pieces = [serve(probes[0].at(piece)) for piece in torch.split(torch.arange(probes[0].samples), sizes)]
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
