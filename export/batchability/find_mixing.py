"""Find where a dense part may mix the samples of a batch, from its operators, for any number of samples.

torch.export lists the operators of core ATen of a dense part with their shapes, in which the number of samples is a
symbol. Each operator must be known to keep samples apart as it is used (`export.batchability.operator_rules`). If one
is not, requests are scored one by one. Only `export.batchability.probe_mixing` runs the dense part.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.batchability.sample_flow import first_mixing_node
from export.capture.dense_trace import DenseTrace, key_of_rows
from export.errors import first_line
from serving.bundle.scores import JaggedKind

# The samples for which operators are compared: no layer has this width.
_COMPARED_SAMPLES = 61
# Operators that TorchScript and torch.export write differently.
_WRITTEN_DIFFERENTLY = (torch.ops.aten._to_copy.default, torch.ops.aten.slice.Tensor)


def find_mixing(
    trace: DenseTrace,
    scripted: torch.jit.ScriptModule | None = None,
    by_id: Mapping[int, str] = MappingProxyType({}),
) -> str | None:
    """Describe the first operator that may let the scores of a sample depend on other samples.

    Args:
        trace: a dense part, with example inputs of more than `_COMPARED_SAMPLES` samples.
        scripted: the dense part in TorchScript, if code of the user may run differently there.
        by_id: the key of each output with a row for each id of a key, by the number of the output.

    Returns:
        The operator with the line of the model's code, or why the operators are unknown. None if each row of each
        output depends on the same row of the inputs alone, for any B.
    """
    try:
        program = trace.decomposed()
    except Exception as error:  # the model's code may raise anything, and so may torch
        message = first_line(error)
        if "data-dependent" in message:
            return "a size that depends on numbers of the request, such as the longest history of a batch"
        return f"a step that torch.export cannot trace: {message}"
    inputs, jagged = trace.inputs, trace.jagged
    if buffers := program.graph_signature.buffers_to_mutate:
        return f"its buffer {min(buffers.values())!r} changes"
    if scripted is not None:
        compared = inputs.select(torch.arange(_COMPARED_SAMPLES)).tensors(jagged)
        if only_scripted := _operators(scripted, compared) - _operators(trace.program.module(), compared):
            return f"{min(only_scripted)[0]}, which only TorchScript runs: the model's code differs there"
    names = [str(name) for name in program.graph_signature.user_inputs]
    if trace.depends_on_ids:
        return "a step that depends on the number of ids"
    jagged_by_name = dict(zip(names[len(names) - len(jagged) :], jagged, strict=True))
    keys: dict[str, str | None] = dict.fromkeys(names)
    keys |= {name: key_of_rows(inputs, tensor) for name, tensor in jagged_by_name.items()}
    lengths = {
        name: inputs.fixed.get(tensor.name, inputs.key_of(tensor.name))
        for name, tensor in jagged_by_name.items()
        if tensor.kind is JaggedKind.LENGTHS
    }
    keys_of_outputs = {number: inputs.key_of(key) for number, key in by_id.items()}
    return first_mixing_node(program.graph, keys, lengths, keys_of_outputs)


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
