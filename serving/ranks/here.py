"""All ranks in this process: a call of the program for each batch, or some for a large one."""

from collections.abc import Sequence

import torch

from serving.bundle.opening import Bundle
from serving.ranks.answered import Answered
from serving.ranks.pieces import Pieces
from serving.ranks.program import load_program, torchscript
from serving.ranks.weights import Weights
from serving.request.tensors import Batch, Embeddings


class Here:
    """The program of a bundle over its memory-mapped weights.

    Args:
        bundle: with all its ranks.
        weights: its files.
        threads: how many look a large batch up, the one that calls among them.

    Attributes:
        forward: the program's, frozen.

    Raises:
        BundleError: the program cannot be loaded.
        EnvironmentMismatch: torch and FBGEMM do not work together.
    """

    def __init__(self, bundle: Bundle, weights: Weights, threads: int = 1) -> None:
        program = load_program(bundle)
        program.weights_host = weights.tensors
        self._read_ahead = weights.read_ahead
        # Freezing folds constants in. `forward` avoids the hooks of nn.Module.__call__: a third of a small lookup.
        with torchscript():
            self.forward = torch.jit.freeze(program.eval()).forward
        self._pieces = Pieces(program, bundle.manifest, threads) if threads > 1 else None

    def answer(self, batches: Sequence[Batch]) -> list[Answered]:
        """Make one TBE call for each batch, or one for each rank; several threads make some for a large batch."""
        for batch in batches:
            self._read_ahead(batch)
        return [Answered(self._answer(batch)) for batch in batches]

    def _answer(self, batch: Batch) -> Embeddings:
        found = None if self._pieces is None else self._pieces.answer(batch)
        return self.forward(*arguments(batch)).numpy() if found is None else found

    def check(self) -> None:
        """There are no hosts."""

    def close(self) -> None:
        """End the threads, where there are some. One thread still answers."""
        if self._pieces is not None:
            self._pieces.close()


def arguments(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """A batch as programs take it: values int64 [N], offsets int64 [F·B + 1], weights float32 [N] or None, features.

    Features are int64 [F], their positions in the manifest. None: the default order, which is compiled in.
    """
    features = None if batch.selection.default else torch.from_numpy(batch.selection.positions)
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    return torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), weights, features
