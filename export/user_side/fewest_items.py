"""From how many items of one user the programs of a user side are faster than the whole dense part."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch

from export.capture.graph_inputs import DenseInputs
from export.relative_time import relative_time
from export.user_side.compile import SplitPart, UserSidePrograms, call_programs, ranking
from serving.lookup.dense_files import Forward, load_user_side_program

# The numbers of items that are measured. Requests with fewer are scored with others, by the whole dense part.
SIZES = (16, 32, 64, 128, 256)


def with_fewest_items(
    programs: UserSidePrograms, split: SplitPart, whole: Forward, probe: DenseInputs
) -> UserSidePrograms:
    """The programs, whose `side` has the smallest of `SIZES` from which on they score a request at least as fast.

    If the whole dense part is faster even with the most items, it has None.

    Args:
        programs: of the user side.
        split: the description of the dense part.
        whole: the whole dense part, in the format that serves.
        probe: its usual inputs.
    """
    loaded = [load_user_side_program(program.save_to_buffer()) for program in (programs.user, programs.items)]
    fewest = None
    for items in reversed(SIZES):
        if time_of_once(loaded, split, whole, probe, items) > 1:
            break
        fewest = items
    return replace(programs, side=msgspec.structs.replace(programs.side, fewest_items=fewest))


def time_of_once(
    programs: Sequence[Forward], split: SplitPart, whole: Forward, probe: DenseInputs, items: int
) -> float:
    """The time of both programs for a request of some items, divided by the time of the whole dense part.

    Both are loaded as for serving, which chooses the library of large products.
    """
    user_program, items_program = programs
    repeated, tensor_pairs = ranking(probe, split, 0, torch.arange(items) % probe.samples)
    embeddings, *others = repeated.tensors(split.part.jagged)

    def score_whole() -> None:
        # The server repeats the user's rows before it calls the whole dense part.
        for first, last in split.user_spans:
            embeddings[:, first:last] = embeddings[:1, first:last]
        whole(
            embeddings,
            *(other.clone() if number in split.arguments else other for number, other in enumerate(others)),
        )

    return relative_time(score_whole, partial(call_programs, user_program, items_program, split, tensor_pairs))
