"""How far the scores of one probe may move if only rounding differs."""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from export.batchability.differences import Numbers, differences, largest_difference, rounding_limit
from export.batchability.probes import Run, run_probes
from export.capture.graph_inputs import DenseInputs
from serving.bundle.scores import DenseDtype

# How far the inputs are moved, relative to each number: about two units of the dtype in which a dense part computes.
_NUDGE = {DenseDtype.FP32: 2**-22, DenseDtype.BF16: 2**-7, DenseDtype.INT8: 2**-22}
# Scores may move by this many times what one nudge moves them, because a dense part rounds at each step.
_STEPS = 16


class Rounding:
    """Tells whether rounding explains a difference between two answers to one probe.

    The sigmoid of a sum of terms of 10⁶ changes much if the sum is rounded in another order. To find out how much,
    the dense part is run on inputs that are moved as far as rounding moves them.

    Args:
        run: runs the dense part.
        probe: its inputs.
        numbers: its answer, by output.
        dtype: of its weights.
        is_usual: whether the numbers of the probe have the usual size. For such a probe only `rounding_limit`
            explains a difference, as docs/protocol.md promises: the answer of a discontinuous model may move by any
            number.
    """

    def __init__(
        self, run: Run, probe: DenseInputs, numbers: Mapping[str, Numbers], dtype: DenseDtype, *, is_usual: bool
    ) -> None:
        self._run = run
        self._probe = probe
        self._numbers = numbers
        self._dtype = dtype
        self._is_usual = is_usual

    def explains(self, name: str, other: Numbers) -> bool:
        """Whether rounding explains that an output has these numbers instead."""
        numbers = self._numbers[name]
        limit = rounding_limit(numbers, self._dtype)
        difference = largest_difference(other, numbers)
        return difference <= limit or (not self._is_usual and self.moves_as_far(name, other))

    def moves_as_far(self, name: str, other: Numbers) -> bool:
        """Whether an output moves as far if its inputs move by a rounding, as a difference of like numbers does."""
        numbers = self._numbers[name]
        if name not in self._nudged or not np.isfinite(largest_difference(other, numbers)):
            return False
        limit = rounding_limit(numbers, self._dtype)
        return bool((differences(other, numbers) <= limit + _STEPS * self._nudged[name]).all())

    @cached_property
    def _nudged(self) -> Mapping[str, Numbers]:
        """The largest |difference| of each number of each output, if the inputs move by a rounding.

        Empty if two runs of the same inputs differ, as they do for random numbers: rounding then explains nothing.
        """
        for _, again in run_probes(self._run, [self._probe, self._probe]):
            if any(largest_difference(again[name], numbers) > 0 for name, numbers in self._numbers.items()):
                return {}
        generator = torch.Generator().manual_seed(3)
        unit = _NUDGE[self._dtype]
        nudges: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda _, floats: floats * (1 + unit),
            *[lambda _, floats: floats * (1 + unit * (2 * torch.rand(floats.shape, generator=generator) - 1))] * 3,
        ]
        largest: dict[str, Numbers] = {}
        for _, answer in run_probes(self._run, [self._probe.with_floats(nudge) for nudge in nudges]):
            for name, numbers in answer.items():
                moved = np.nan_to_num(differences(numbers, self._numbers[name]), nan=0.0, posinf=0.0)
                largest[name] = np.maximum(largest.get(name, 0.0), moved)
        return largest
