"""A large batch looked up by several threads: each calls the program for blocks of it."""

import inspect
import textwrap
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from serving.bundle.manifest import Manifest
from serving.bundle.tables import OutputDtype
from serving.ranks.cut import Sizes, cut
from serving.ranks.kept_memory import KeptMemory
from serving.ranks.program import torchscript
from serving.ranks.threads import Threads
from serving.request.tensors import Batch, Embeddings

# In bytes that are read and written; figures are in docs/decisions/0019-threads.md.
# Each thread has at least so much to do.
LEAST = 8 << 20
# What the program answers at once: it is still in the core's cache when it is copied.
BLOCK = 1 << 19
# To find a row takes about as long as to read so many bytes, and more where no cache holds its table.
OF_AN_ID = 64
LARGE_TABLE = 32 << 20
MISS = 288
# What the thread that calls does before another one is awake, and after that one is done.
HEAD_START = 1 << 19
# What another call of the program takes.
CALL = 1 << 17
# The answer to a block is written, and copied to where it belongs.
_MOVES = 2


class Pieces:
    """The program of a bundle, for several threads at once.

    Args:
        program: with its weights, not frozen.
        manifest: of the bundle.
        threads: how many look up, the one that calls among them.
    """

    def __init__(self, program: torch.jit.ScriptModule, manifest: Manifest, threads: int) -> None:
        dtype = torch.float16 if manifest.output_dtype is OutputDtype.FP16 else torch.float32
        self._itemsize = dtype.itemsize
        tables = manifest.feature_tables
        is_large = np.array([table.rows * table.row_bytes >= LARGE_TABLE for table in tables])
        self._id_bytes = np.array([table.row_bytes for table in tables]) + np.where(is_large, MISS, OF_AN_ID)
        self._bag_bytes = np.array([table.dim for table in tables]) * (_MOVES * self._itemsize)
        self._most = int(self._id_bytes.max()), int(self._bag_bytes.max())
        self._memory = KeptMemory(dtype)
        self._look_up = _compiled(program)
        self._count = threads
        self._threads = Threads(threads - 1)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def answer(self, batch: Batch) -> Embeddings | None:
        """As the program answers the batch, bit for bit. None: it is too small to be worth it."""
        selection, offsets = batch.selection, batch.offsets
        bags = offsets.size - 1
        if not bags or batch.values.size * self._most[0] + bags * self._most[1] < 2 * LEAST:
            return None
        here = selection.positions
        sizes = Sizes(offsets, self._id_bytes[here].tolist(), self._bag_bytes[here].tolist())
        total = float(sizes.ends[-1])
        threads = min(self._count, int(total // max(LEAST, 1)))
        if threads < 2:
            return None
        share = max(total - HEAD_START, 0) / threads
        parts = cut(sizes, [total - (threads - 1) * share, *[share] * (threads - 1)], CALL)
        columns = [0, *selection.ends.tolist()]
        answer = self._memory.array(sizes.samples, columns[-1])
        # One call into torch for each thread, without Python's lock. With a call for each of its operators, threads
        # wait for that lock, and are woken for it, again and again.
        look_up = partial(
            self._look_up,
            torch.from_numpy(batch.values),
            torch.from_numpy(offsets),
            None if batch.weights is None else torch.from_numpy(batch.weights),
            torch.from_numpy(selection.positions),
            columns,
            torch.from_numpy(answer),
            BLOCK // self._itemsize,
        )
        self._threads.run([partial(look_up, part) for part in parts if part])
        return answer


def _compiled(program: torch.jit.ScriptModule) -> Callable[..., None]:
    """`_Program.look_up` of a program.

    It becomes a method of the program, and goes with it. `torch.jit.script` would keep what it compiles, and the
    weights with it, as long as the process lives.
    """
    with torchscript():
        program.define(textwrap.dedent(inspect.getsource(_Program.look_up)))
        frozen = torch.jit.freeze(program.eval(), preserved_attrs=["look_up"])
    look_up: Callable[..., None] = frozen.look_up
    return look_up


class _Program(nn.Module):
    """What a program becomes: it can look up pieces of a batch."""

    def look_up(
        self,
        values: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        features: Tensor,
        columns: list[int],
        answer: Tensor,
        block: int,
        pieces: list[tuple[int, int, int, int]],
    ) -> None:
        """Look pieces up, block by block, and put them in `answer`. This is TorchScript.

        Args:
            values, offsets, per_sample_weights, features: of the batch, as programs take them; features int64 [F].
            columns: where each feature begins in an answer, then D [F + 1].
            answer: [B, D] in the program's dtype, of the whole batch. What no piece has is not written.
            block: the most numbers of an answer that the program is called for, and at least a bag.
            pieces: of the batch, as `Piece`.
        """
        samples = answer.size(0)
        for feature, last_feature, first_sample, last_sample in pieces:
            first = feature
            while first < last_feature:
                # Whole features, as many as a block has room for, or else samples of one.
                last = first + 1
                while last < last_feature and (columns[last + 1] - columns[first]) * samples <= block:
                    last += 1
                column, width = columns[first], columns[last] - columns[first]
                step = samples if last - first > 1 else max(block // max(width, 1), 1)
                for sample in range(first_sample, last_sample, step):
                    rows = min(step, last_sample - sample)
                    bag, bags = first * samples + sample, (last - first - 1) * samples + rows
                    id_ = int(offsets[bag])
                    ids = int(offsets[bag + bags]) - id_
                    weights: Tensor | None = None
                    if per_sample_weights is not None:
                        weights = per_sample_weights.narrow(0, id_, ids)
                    found = self.forward(
                        values.narrow(0, id_, ids),
                        offsets.narrow(0, bag, bags + 1) - id_,
                        weights,
                        features.narrow(0, first, last - first),
                    )
                    answer.narrow(0, sample, rows).narrow(1, column, width).copy_(found)
                first = last
