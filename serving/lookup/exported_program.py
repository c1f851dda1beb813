"""The dense part as an exported program, which `torch.export.save` wrote, as a function.

Loading one imports the modules of torch.export, which takes seconds, and 100 MB in each process. A call runs the
operators of the graph from Python, which costs a few microseconds for each.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from serving.lookup.gemm import prefer_onednn_in_graph

# The environment variable by which `torch.load` refuses all but tensors.
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# Operators that check the dtype and device of a tensor, which are known here.
_CHECKS = ("aten._assert_tensor_metadata.default",)


def load_exported_program(content: bytes) -> Callable[..., Sequence[Tensor]]:
    """The forward of an exported program.

    Args:
        content: the content of its file.

    Returns:
        A function of the program's inputs. It checks neither their number nor their shapes.

    Raises:
        Exception: torch cannot load it. torch does not document the type.
    """
    import torch.export  # imported here because it takes seconds

    with _no_pickled_objects():
        return forward_of(torch.export.load(io.BytesIO(content)))


@contextmanager
def _no_pickled_objects() -> Iterator[None]:
    """During the block, `torch.load` reads only tensors.

    torch.export calls it with `weights_only=False` for other objects, which may run any code.
    """
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


def forward_of(program: "torch.export.ExportedProgram") -> Callable[..., Sequence[Tensor]]:
    """The forward of an exported program, without torch.export's checks in each call.

    Args:
        program: a program with a graph of operators. It shares its tensors with the function.
    """
    # The graph takes the weights as its first inputs. `ExportedProgram.module` reads them from a module instead,
    # which takes as long as the operators of a small network.
    weights = [_tensor(program, spec) for spec in program.graph_signature.input_specs if not _is_user_input(spec)]
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        node.meta.clear()  # fake tensors, which keep the symbols of shapes
        if str(node.target) in _CHECKS:
            graph.erase_node(node)
    prefer_onednn_in_graph(graph, weights)
    module = torch.fx.GraphModule(program.graph_module, graph)
    return partial(module.forward, *weights)


def _is_user_input(spec: Any) -> bool:
    return str(spec.kind.name) == "USER_INPUT"


def _tensor(program: "torch.export.ExportedProgram", spec: Any) -> Any:
    """A parameter, a buffer or a constant of a program."""
    value = program.state_dict[spec.target] if spec.target in program.state_dict else program.constants[spec.target]
    return value.detach() if isinstance(value, Tensor) else value
