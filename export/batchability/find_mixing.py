"""Find where a dense part may mix the samples of a batch, from its operators, for any number of samples.

torch.export lists the operators of core ATen of a dense part with their shapes, in which the number of samples is a
symbol. Each operator must be known to keep samples apart as it is used (`export.batchability.operator_rules`). If one
is not, requests are scored one by one. Only `export.batchability.probe_mixing` runs the dense part.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.batchability.sample_flow import first_mixing_node
from export.capture.branch_log import BranchLog, guard_on_ids, record_branches, symbols_of
from export.capture.graph_inputs import DenseInputs
from export.capture.row_counts import dims_of_keys
from export.errors import first_line
from export.trained.eval_mode import quiet
from serving.bundle.scores import JaggedInput, JaggedKind

# The samples for which operators are compared: no layer has this width.
_COMPARED_SAMPLES = 61
# Operators that TorchScript and torch.export write differently.
_WRITTEN_DIFFERENTLY = (torch.ops.aten._to_copy.default, torch.ops.aten.slice.Tensor)


def find_mixing(
    module: fx.GraphModule,
    inputs: DenseInputs,
    jagged: Sequence[JaggedInput] = (),
    scripted: torch.jit.ScriptModule | None = None,
    by_id: Mapping[int, str] = MappingProxyType({}),
) -> str | None:
    """Describe the first operator that may let the scores of a sample depend on other samples.

    Args:
        module: a dense part. It takes tensors [B, …] and `jagged`, and returns tensors [B, …] or [n, …].
        inputs: example inputs of more than `_COMPARED_SAMPLES` samples.
        jagged: the ids, lengths, weights and rows that it takes.
        scripted: the dense part in TorchScript, if code of the user may run differently there.
        by_id: the key of each output with a row for each id of a key, by the number of the output.

    Returns:
        The operator with the line of the model's code, or why the operators are unknown. None if each row of each
        output depends on the same row of the inputs alone, for any B.
    """
    try:
        # torch prints graphs that it cannot export.
        with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()), fx.traceback.preserve_node_meta():
            with record_branches(BranchLog()) as branches:
                exported = torch.export.export(
                    Interpreted(module),
                    tuple(inputs.tensors(jagged)),
                    dynamic_shapes=(dynamic_dims(inputs, jagged),),
                    strict=False,
                )
            program = exported.run_decompositions()
    except Exception as error:  # the model's code may raise anything, and so may torch
        message = first_line(error)
        if "data-dependent" in message:
            return "a size that depends on numbers of the request, such as the longest history of a batch"
        return f"a step that torch.export cannot trace: {message}"
    if buffers := program.graph_signature.buffers_to_mutate:
        return f"its buffer {min(buffers.values())!r} changes"
    if scripted is not None:
        few = inputs.select(torch.arange(_COMPARED_SAMPLES)).tensors(jagged)
        if only_scripted := _operators(scripted, few) - _operators(exported.module(), few):
            return f"{min(only_scripted)[0]}, which only TorchScript runs: the model's code differs there"
    names = [str(name) for name in program.graph_signature.user_inputs]
    nodes = [node for node in program.graph.nodes if node.name in names]
    symbols = {symbol for node in nodes for symbol in symbols_of(node.meta["val"].shape)}
    if guard_on_ids(nodes[0].meta["val"].shape[0].node, symbols, branches.guards):
        return "a step that depends on the number of ids"
    jagged_by_name = dict(zip(names[len(names) - len(jagged) :], jagged, strict=True))
    keys: dict[str, str | None] = dict.fromkeys(names)
    keys |= {name: _key_of_rows(inputs, tensor) for name, tensor in jagged_by_name.items()}
    lengths = {
        name: inputs.fixed.get(tensor.name, inputs.key_of(tensor.name))
        for name, tensor in jagged_by_name.items()
        if tensor.kind is JaggedKind.LENGTHS
    }
    keys_of_outputs = {number: inputs.key_of(key) for number, key in by_id.items()}
    return first_mixing_node(program.graph, keys, lengths, keys_of_outputs)


def _key_of_rows(inputs: DenseInputs, jagged: JaggedInput) -> str | None:
    """The key of an input that has a row for each id of a key, or None if it has a row for each sample."""
    return None if jagged.kind is JaggedKind.LENGTHS else inputs.key_of(jagged.name)


def dynamic_dims(inputs: DenseInputs, jagged: Sequence[JaggedInput]) -> tuple[dict[int, Any], ...]:
    """The dynamic first dimension of each input: the number of samples, or the number of ids of its key."""
    keys = [*(None for _ in (inputs.embeddings, *inputs.dense)), *(_key_of_rows(inputs, tensor) for tensor in jagged)]
    return dims_of_keys(keys, inputs.fixed)


class Interpreted(nn.Module):
    """Runs a graph node by node, so that each node of torch.export keeps the line of the model's code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """The answer of the graph."""
        return fx.Interpreter(self.module).run(*inputs)


class _RecordOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, records the operators that run on tensors of some samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[tuple[str, str]] = set()
        self._samples = samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args]
        has_samples = any(isinstance(shape, tuple) and self._samples in shape for shape in shapes)
        if has_samples and func not in _WRITTEN_DIFFERENTLY:
            self.operators.add((str(func), str(shapes)))
        return func(*args, **(kwargs or {}))


def _operators(module: nn.Module, inputs: Sequence[Tensor]) -> set[tuple[str, str]]:
    """The operators that a module runs on inputs, with the shapes of their tensors and their other arguments."""
    record = _RecordOperators(len(inputs[0]))
    with torch.no_grad(), record:
        module(*(tensor.clone() for tensor in inputs))
    return record.operators
