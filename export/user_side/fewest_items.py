"""From how many items of one user the programs of a user side are faster than the whole dense part."""

from dataclasses import replace
from functools import partial

import msgspec
import torch

from export.capture.graph_inputs import DenseInputs
from export.relative_time import relative_time
from export.user_side.compile import SplitPart, UserSidePrograms, call_programs, ranking
from serving.lookup.dense_files import Forward

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
    fewest = None
    for items in reversed(SIZES):
        repeated, once = ranking(probe, split, 0, torch.arange(items) % probe.samples)
        score_whole = partial(whole, *repeated.tensors(split.part.jagged))
        if relative_time(score_whole, partial(call_programs, programs.user, programs.items, split, once)) > 1:
            break
        fewest = items
    return replace(programs, side=msgspec.structs.replace(programs.side, fewest_items=fewest))
