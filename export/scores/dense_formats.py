"""A dense part in each of its formats: compiled, compared, and ready to be written."""

import copy
import io
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, fx

from export.batchability.branches import find_branch
from export.batchability.probes import Run, run_probes
from export.capture.branch_log import symbols_of
from export.capture.dense_trace import DenseTrace
from export.capture.graph_inputs import DenseInputs
from export.errors import ModelError, compiler_line, first_line
from export.relative_time import relative_time
from export.scores.aot_inductor import compile_to_native
from export.scores.dense_subgraph import DenseSubgraph, model_errors
from export.scores.dense_weights import with_dtype
from export.scores.score_parity import expect_same_scores
from export.trained.eval_mode import quiet
from export.trained.source_location import line_of
from serving.bundle.scores import EXPORTED_SCORES, SCORES, DenseDtype, DenseFile, DenseFormat
from serving.lookup.dense_files import Forward, load_dense_file
from serving.torchscript import torchscript, torchscript_error

# What torch.export notes of each node and no reader needs: paths and lines of the model's code among it.
_PRIVATE_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom")
# What an error of `--compile` begins with, after the class of the model.
_NATIVE = "its forward cannot be compiled to native code, export it without --compile"
# A format comes before an earlier one only if it takes less than this part of the time.
_CLEARLY_FASTER = 0.9


@dataclass(frozen=True, slots=True)
class CompiledFile:
    """A dense part in one format.

    Attributes:
        file: for the manifest.
        content: of the file.
        forward: what the content runs, loaded as for serving.
    """

    file: DenseFile
    content: bytes
    forward: Forward


@dataclass(frozen=True, slots=True)
class DenseFormats:
    """The formats of a dense part.

    Attributes:
        files: at least one, the fastest first.
        scripted: the dense part in TorchScript. None: this release of torch has no TorchScript.
        notes: a line if a format is left out.
    """

    files: tuple[CompiledFile, ...]
    scripted: "torch.jit.ScriptModule | None"
    notes: tuple[str, ...]

    @property
    def described(self) -> tuple[DenseFile, ...]:
        """The files for the manifest: none if there is TorchScript alone, which every reader knows."""
        files = tuple(compiled.file for compiled in self.files)
        return () if [file.format for file in files] == [DenseFormat.TORCHSCRIPT] else files

    @property
    def forward(self) -> Forward:
        """Runs the dense part."""
        return self.files[0].forward if self.scripted is None else self.scripted


def compile_formats(
    trace: DenseTrace,
    subgraph: DenseSubgraph,
    dtype: DenseDtype,
    requests: Sequence[DenseInputs],
    native: DenseFile | None,
    *,
    is_own: bool,
) -> DenseFormats:
    """Compile a dense part to TorchScript where torch has it, and to an exported program where torch.export can.

    Args:
        trace: the dense part, with FP32 weights.
        subgraph: has its inputs and outputs.
        dtype: of the weights that serve.
        requests: inputs on which the formats must agree. Those that the dense part refuses are skipped.
        native: also compile it to native code, for this file. None: it is not.
        is_own: whether it is a module of the user's own, whose branches torch.export does not see.

    Raises:
        ModelError: TorchScript cannot compile it; or there is no TorchScript, and torch.export cannot follow it; or
            it cannot be compiled to native code that answers as it does.
    """
    files: list[CompiledFile] = []
    notes: list[str] = []
    scripted = None
    name, reason = subgraph.model_name, torchscript_error()
    if reason is None:
        scripted = _compile_torchscript(name, with_dtype(trace.module, dtype, DenseFormat.TORCHSCRIPT))
        files.append(_file(DenseFile(SCORES, DenseFormat.TORCHSCRIPT), scripted.save_to_buffer()))
    typed = with_dtype(trace.module, dtype, DenseFormat.EXPORTED_PROGRAM)
    expected = partial(subgraph.scores, typed if scripted is None else scripted)

    def compare(file: CompiledFile) -> CompiledFile:
        run_float = partial(subgraph.scores, trace.module)
        compared = requests if dtype is not DenseDtype.INT8 else _finite(run_float, requests)
        expect_same_scores(expected, partial(subgraph.scores, file.forward), compared, dtype)
        return file

    try:
        if is_own and scripted is not None and (branch := find_branch(scripted)) is not None:
            raise ValueError(branch)
        exported = _exported(_with_symbolic_numbers(trace, typed))
        files.append(compare(_file(DenseFile(EXPORTED_SCORES, DenseFormat.EXPORTED_PROGRAM), exported)))
    except Exception as error:  # the model's code may raise anything, and so may torch
        message = first_line(error)
        if scripted is None:
            raise ModelError(
                f"{name}: its forward cannot be compiled: TorchScript: {reason}; torch.export: {message}"
            ) from error
        if native is not None:
            raise ModelError(f"{name}: {_NATIVE}: torch.export: {message}") from error
        notes.append(f"scores need TorchScript, without {EXPORTED_SCORES}: {message}")
    if native is not None:
        try:
            files.append(compare(_file(native, compile_to_native(exported, requests[0].tensors(subgraph.jagged)))))
        except Exception as error:  # torch does not say of which types
            cause = error.__cause__ if isinstance(error, ModelError) else None  # a ModelError has another advice
            message = first_line(cause if isinstance(cause, Exception) else error)
            raise ModelError(f"{name}: {_NATIVE}: {message}") from error
    calls = [request.tensors(subgraph.jagged) for request in (requests[0].select(torch.tensor([0])), requests[0])]
    return DenseFormats(tuple(_fastest_first(files, calls)), scripted, tuple(notes))


def _finite(run: Run, requests: Sequence[DenseInputs]) -> list[DenseInputs]:
    """The requests with finite scores only.

    INT8 has no NaN. With a NaN among its inputs, FBGEMM's layer takes a range that depends on their order, and ours
    answers NaN.
    """
    return [
        request
        for request, scores in run_probes(run, requests)
        if all(np.isfinite(numbers).all() for numbers in scores.values())
    ]


def _compile_torchscript(model_name: str, module: fx.GraphModule) -> "torch.jit.ScriptModule":
    """A dense part in TorchScript, frozen."""
    lines = {node.name: line_of(node) for node in module.graph.nodes}

    def line_of_statement(statement: str) -> str:
        return lines.get(statement.partition(" = ")[0], "")

    line_of_error = partial(compiler_line, line_of=line_of_statement)
    with torchscript(), quiet(), model_errors(model_name, "its forward cannot be compiled", line_of_error):
        program: torch.jit.ScriptModule = torch.jit.freeze(torch.jit.script(module).eval())
    return program


def _with_symbolic_numbers(trace: DenseTrace, typed: fx.GraphModule) -> DenseTrace:
    """A dense part that keeps sizes symbolic where it computes with them. TorchScript needs Python's own functions.

    Args:
        trace: the dense part in FP32, which is the result if it computes with no sizes and is `typed`.
        typed: the dense part with the weights that serve.
    """
    if typed is trace.module and not any(node.target in _SYMBOLIC for node in typed.graph.nodes):
        return trace
    graph = copy.deepcopy(typed.graph)
    for node in graph.nodes:
        node.target = _SYMBOLIC.get(node.target, node.target)
    return DenseTrace(fx.GraphModule(typed, graph, type(typed).__name__), trace.inputs, trace.jagged)


def _exported(trace: DenseTrace) -> bytes:
    """A dense part as an exported program for any number of samples and ids, in the format of `torch.export.save`.

    Raises:
        Exception: torch.export cannot follow it, or for some numbers of samples and ids alone.
    """
    traced = trace.program
    names = traced.graph_signature.user_inputs
    sizes = [node.meta["val"].shape[0] for node in traced.graph.nodes if node.name in names]
    if any(isinstance(size, int) for size in sizes) or trace.depends_on_ids:
        raise ValueError("a step that depends on the number of ids")
    program = torch.export.ExportedProgram(
        traced.graph_module,
        copy.deepcopy(traced.graph),
        traced.graph_signature,
        traced.state_dict,
        {**traced.range_constraints},
        traced.module_call_graph,
        constants=traced.constants,  # without example inputs, which are numbers of the user
        verifiers=traced.verifiers,
    )
    _drop_assumed_bounds(program)
    for node in program.graph.nodes:
        for name in _PRIVATE_META:
            node.meta.pop(name, None)
    content = io.BytesIO()
    with quiet():
        torch.export.save(program, content)
    return content.getvalue()


def _drop_assumed_bounds(program: "torch.export.ExportedProgram") -> None:
    """Remove the assertions that an input has at least two rows. All others stay.

    torch.export assumes two rows where a size varies. It asserts this in the graph where a size that depends on
    numbers of the request equals the size of an input, as in `repeat_interleave(x, lengths) + rows`.
    """
    graph, names = program.graph, program.graph_signature.user_inputs
    shapes = [node.meta["val"].shape for node in graph.nodes if node.name in names]
    sizes = {symbol for shape in shapes for symbol in symbols_of(shape)}
    for assertion in [node for node in graph.nodes if node.target is torch.ops.aten._assert_scalar.default]:
        condition: Any = assertion.args[0]
        is_bound = condition.target is operator.ge and condition.args[1] == 2
        if is_bound and condition.args[0].meta["val"].node.expr in sizes:
            graph.erase_node(assertion)
    for symbol in shapes[0][0].node.shape_env.replacements:  # torch warns of the bounds of symbols without a node
        program.range_constraints.pop(symbol, None)


def _symbolic(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: function(value.item() if isinstance(value, Tensor) else value)


_SYMBOLIC: Mapping[Any, Any] = {
    max: torch.sym_max,
    min: torch.sym_min,
    operator.not_: torch.sym_not,
    float: _symbolic(torch.sym_float),
    int: _symbolic(torch.sym_int),
}


def _file(file: DenseFile, content: bytes) -> CompiledFile:
    return CompiledFile(file, content, load_dense_file(file.format, content))


def _fastest_first(files: Sequence[CompiledFile], requests: Sequence[Sequence[Tensor]]) -> list[CompiledFile]:
    """The formats of a dense part, the fastest first, with their relative times.

    A format goes before an earlier one of `files` only if it is clearly faster: a busy machine shall not decide.

    Args:
        files: at least one.
        requests: the inputs of some calls.
    """
    if len(files) == 1:
        return [*files]
    first_forward = files[0].forward
    times = {
        file.file.name: geometric_mean(
            relative_time(partial(first_forward, *request), partial(file.forward, *request)) for request in requests
        )
        for file in files
    }
    ordered = sorted(
        files, key=lambda file: 1.0 if times[file.file.name] > _CLEARLY_FASTER else times[file.file.name]
    )
    first = times[ordered[0].file.name]
    return [
        replace(file, file=msgspec.structs.replace(file.file, relative_time=times[file.file.name] / first))
        for file in ordered
    ]
