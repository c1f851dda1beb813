"""The weights of a dense part: the trained model's own, or those of a checkpoint."""

from typing import cast

from torch import fx

from export.errors import CheckpointError
from export.scores.cut import Cut
from export.trained.checkpoint import Checkpoint
from export.trained.copied import copied
from export.trained.modules import dotted

# What torch.fx calls the tensors that a forward makes itself.
_MADE = "_tensor_constant"


def with_weights(found: Cut, path: str, checkpoint: Checkpoint | None) -> fx.GraphModule:
    """A copy of what was cut out, on the CPU, with the weights that serve."""
    module = cast(fx.GraphModule, copied(found.module, ()).eval())
    if checkpoint is None:
        return module.cpu()
    state = module.state_dict()
    made = {name: each for name, each in state.items() if name.startswith(_MADE)}
    for name, buffer in module.named_buffers():
        if buffer.is_meta and not (name in state and buffer.is_floating_point()):
            raise CheckpointError(
                "a buffer of the dense part is on the meta device, and its numbers are in no checkpoint: build the "
                "model with its tables alone on meta, as --checkpoint does"
            )
    module = module.to_empty(device="cpu") if any(each.is_meta for each in state.values()) else module.cpu()
    weights = {
        name: checkpoint.numbers(f"weights {name!r}", dotted(path, name), tuple(each.shape))
        for name, each in state.items()
        if each.is_floating_point() and name not in made
    }
    module.load_state_dict(weights | made, strict=False)
    return module
