"""What torch.export cannot see of a dense part: opaque functions and hooks, and branches of TorchScript."""

from typing import Any

import torch
from torch import fx, nn

from export.trained.source_location import short_line_of

# Packages whose functions torch.fx and torch.export trace as they are.
_TRACED_PACKAGES = ("torch", "torchrec", "fbgemm_gpu", "_operator", "builtins", "math")
# Properties of an argument that do not depend on its numbers and sizes.
_STATIC = (
    "aten::dim", "aten::is_grad_enabled",
    "prim::dtype", "prim::device", "prim::Constant", "prim::CreateObject",
)  # fmt: skip
_LOGIC = ("aten::__is__", "aten::__isnot__", "aten::__not__", "aten::eq", "aten::ne", "prim::GetAttr", "prim::If")
_OF_FIXED_LENGTH = (
    "aten::size", "aten::items", "aten::keys", "aten::values", "prim::ListConstruct", "prim::DictConstruct",
)  # fmt: skip


def find_opaque_step(module: fx.GraphModule) -> str | None:
    """Describe a node that runs code which torch.export does not trace, or return None.

    Such a function, module or hook may do something else for other numbers of samples, or in TorchScript.
    """
    for node in module.graph.nodes:
        called: Any = node.target
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            called = type(layer)
            if (hooked := _hooked_part(layer)) is not None:
                return f"a hook, or forward of its own, of a {type(hooked).__name__},{short_line_of(node)}"
        package = (getattr(called, "__module__", None) or "torch").partition(".")[0]
        if node.op in ("call_module", "call_function") and package not in _TRACED_PACKAGES:
            return f"{called.__qualname__}, which is not traced,{short_line_of(node)}"
    return None


def _hooked_part(layer: nn.Module) -> nn.Module | None:
    """The first submodule with hooks or a forward of its own, or None."""
    for part in layer.modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            return part
    return None


def find_branch(program: torch.jit.ScriptModule) -> str | None:
    """Describe a branch or loop of TorchScript that depends on numbers or sizes, or return None.

    torch.export traces only one of the sides.
    """
    graph: Any = program.inlined_graph
    for kind in ("prim::If", "prim::Loop"):
        for node in graph.findAllNodes(kind, recurse=True):
            inputs = [*node.inputs()]
            if kind == "prim::If":
                conditions = inputs[:1]
            else:  # the count, the first condition, and the next condition, which the block returns
                conditions = [*inputs[:2], *(next(block.outputs()) for block in node.blocks())]
            if any(map(_depends_on_inputs, conditions)):
                return f"a branch or loop ({kind}) that depends on its inputs"
    return None


def _depends_on_inputs(value: Any) -> bool:
    """Whether a value of TorchScript depends on the numbers or sizes of a program's inputs."""
    node = value.node()
    is_fixed_length = node.kind() == "aten::len" and node.inputsAt(0).node().kind() in _OF_FIXED_LENGTH
    if is_fixed_length or node.kind() in _STATIC:
        return False
    sources = [*node.inputs(), *(output for block in node.blocks() for output in block.outputs())]
    return node.kind() not in _LOGIC or any(map(_depends_on_inputs, sources))
