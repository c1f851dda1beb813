"""All ranks in this process: one call of the program."""

from collections.abc import Sequence

import torch

from serving.bundle.opening import Bundle
from serving.ranks.answered import Answered
from serving.ranks.program import load_program, torchscript
from serving.ranks.weights import map_weights
from serving.request.tensors import Batch


class Here:
    """The program of a bundle over its memory-mapped weights.

    Attributes:
        forward: the program's, frozen.

    Raises:
        BundleError: the program cannot be loaded, or a file cannot be mapped.
        EnvironmentMismatch: torch and FBGEMM do not work together.
    """

    def __init__(self, bundle: Bundle) -> None:
        program = load_program(bundle)
        program.weights_host = map_weights(bundle.path, bundle.manifest.plan)
        # Freezing folds constants in. `forward` avoids the hooks of nn.Module.__call__: a third of a small lookup.
        with torchscript():
            self.forward = torch.jit.freeze(program.eval()).forward

    def answer(self, batches: Sequence[Batch]) -> list[Answered]:
        """Make one TBE call for each batch, or one for each rank."""
        return [Answered(self.forward(*arguments(batch)).numpy()) for batch in batches]

    async def answer_async(self, batches: Sequence[Batch]) -> list[Answered]:
        """As `answer`: a call takes less time than another thread."""
        return self.answer(batches)

    def check(self) -> None:
        """There are no hosts."""

    def close(self) -> None:
        """Nothing is open."""

    async def close_async(self) -> None:
        """As `close`."""


def arguments(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """A batch as programs take it: values int64 [N], offsets int64 [F·B + 1], weights float32 [N] or None, features.

    Features are int64 [F], their positions in the manifest. None: the default order, which is compiled in.
    """
    features = None if batch.selection.default else torch.from_numpy(batch.selection.positions)
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    return torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), weights, features
