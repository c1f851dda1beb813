"""The ranks of a bundle in this process: one call of the program for a batch, or several for a large batch."""

from collections.abc import Sequence
from functools import partial

from serving.bundle.load import Bundle
from serving.lookup.batch_answer import BatchAnswer, program_arguments
from serving.lookup.parallel_lookup import ParallelLookup, look_up_pieces
from serving.lookup.program import load_program
from serving.lookup.ranks_without_hosts import RanksWithoutHosts
from serving.requests.batches import Batch
from serving.requests.types import Embeddings
from serving.tables.table_files import TableFiles


class LocalRanks(RanksWithoutHosts):
    """The program of a bundle over its memory-mapped weights.

    Args:
        bundle: a bundle whose ranks are all on this host.
        weights: its weights files.
        threads: the number of threads that look up a large batch, the calling one included.

    Attributes:
        loaded_program: the program, and how it runs.
        forward: the program's forward. It takes `program_arguments(batch)`.

    Raises:
        BundleError: the program cannot be loaded.
        EnvironmentMismatch: torch and FBGEMM do not work together.
    """

    def __init__(self, bundle: Bundle, weights: TableFiles, threads: int = 1) -> None:
        added = () if threads == 1 else (look_up_pieces,)
        self.loaded_program = load_program(bundle, weights.tensors, added=added)
        self._weights = weights
        # Without the hooks of nn.Module.__call__, which take a third of a small lookup.
        self.forward = self.loaded_program.program.forward
        self._pieces = None
        if threads > 1:
            self._pieces = ParallelLookup(self.loaded_program.program.look_up_pieces, bundle.manifest, threads)

    def answer(self, batches: Sequence[Batch]) -> list[BatchAnswer]:
        """Look up each batch: one TBE call for each rank, or several calls on several threads for a large batch."""
        if (ahead := self._weights.ahead) is not None:
            for batch in batches:
                ahead.ask(batch)
        return [BatchAnswer(self._answer(batch)) for batch in batches]

    def _answer(self, batch: Batch) -> Embeddings:
        if (live := self._weights.live) is not None:
            return live.state.read(partial(self._look_up, batch))
        return self._look_up(batch)

    def _look_up(self, batch: Batch) -> Embeddings:
        pooled = None if self._pieces is None else self._pieces.answer(batch)
        return self.forward(*program_arguments(batch)).numpy() if pooled is None else pooled

    def close(self) -> None:
        """End the threads. Batches are still answered, on the calling thread."""
        if self._pieces is not None:
            self._pieces.close()
