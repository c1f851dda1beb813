"""The dtypes in which scores are served: those of the model, but FP16 and BF16 as float32."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, fx

from export.errors import ModelError
from serving.bundle.scores import SCORE_DTYPES

_SERVED = tuple(torch.from_numpy(np.zeros(0, dtype)).dtype for dtype in SCORE_DTYPES)


def as_served(score: Tensor) -> Tensor:
    """A score in the dtype in which it is served. float32 holds every number of FP16 and BF16."""
    return score.float() if score.dtype in (torch.float16, torch.bfloat16) else score


def cast_outputs(module: fx.GraphModule, answers: Sequence[Tensor], names: Sequence[str]) -> None:
    """Make a dense part convert each output to the dtype in which it is served, whatever its weights will be.

    Args:
        module: the dense part.
        answers: its answers to any inputs.
        names: of its outputs.

    Raises:
        ModelError: no response can have an output of this dtype.
    """
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    casts = []
    with module.graph.inserting_before(output):
        for node, answer, name in zip(output.args[0], answers, names, strict=True):
            dtype = as_served(answer).dtype
            if dtype not in _SERVED:
                expected = ", ".join(_name(served) for served in (*_SERVED, torch.float16, torch.bfloat16))
                raise ModelError(
                    f"output {name!r}: expected one of {expected}, got {_name(dtype)}: convert it in the forward; of "
                    "complex numbers, answer with both parts"
                )
            # An output of integers may be a view of an input, so it is copied.
            method = {torch.float32: "float", torch.float64: "double"}.get(dtype, "clone")
            casts.append(module.graph.call_method(method, (node,)))
    output.args = (tuple(casts),)
    module.recompile()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
