"""Inputs of a dense part of many sizes: they show where two programs differ, and where samples meet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from export.capture.graph_inputs import DenseInputs
from export.rows.table_error import finite
from serving.bundle.scores import DenseDtype

# Scores of the same numbers may differ by this, relative to the largest: a product of matrices is rounded in another
# order where there are more samples, and where it is compiled.
_ROUNDING = 1e-5
_ROUNDING_OF = {DenseDtype.FP32: _ROUNDING, DenseDtype.BF16: 2**-6, DenseDtype.INT8: _ROUNDING}
# Samples of the pieces that a probe is answered in, to see whether samples are mixed.
_PIECES = (1, 3)


def split_sizes(samples: int) -> list[int]:
    """The samples of each of the requests that a probe is cut into, to see whether samples are mixed."""
    return [*_PIECES, samples - sum(_PIECES)]


def rounding_limit(numbers: npt.NDArray[Any], dtype: DenseDtype) -> float:
    """By how much scores of the same numbers may differ."""
    return _ROUNDING_OF[dtype] * scale_of(numbers)


def largest_difference(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """The largest |difference|; infinity where shapes differ, or one number is finite and the other is not."""
    if one.shape != other.shape:
        return float("inf")
    return float(np.nan_to_num(moved(one, other), nan=np.inf).max(initial=0))


def moved(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """|difference| of each number. Of integers and booleans it is a float64, which holds that of any two."""
    if one.dtype.kind != "f":
        # Beyond 2**53 float64 has not all integers: another one is another one.
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
        is_other: npt.NDArray[Any] = one != other
        return np.maximum(difference, is_other.astype(np.float64))
    return cast(npt.NDArray[Any], np.abs(np.subtract(*finite(one, other))))


def scale_of(numbers: npt.NDArray[Any]) -> float:
    """The largest |number|, of those that are finite."""
    return float(np.abs(numbers[np.isfinite(numbers)].astype(np.float64)).max(initial=0))


def as_served(score: Tensor) -> Tensor:
    """A score of a model in the dtype that it is served in: FP16 and BF16 as float32, which has them all."""
    return score.float() if score.dtype in (torch.float16, torch.bfloat16) else score


Numbers = npt.NDArray[Any]
# A dense part: what it is given for B samples in, outputs [B, …] by name out.
Run = Callable[[DenseInputs], Mapping[str, Numbers]]
# Activations of a trained model are rarely so small or so large. Raw features, such as a price or an age in seconds,
# are.
_SCALES = (1e-3, 1.0, 1e3, 1e6)


def scaled_probes(given: DenseInputs) -> list[DenseInputs]:
    """Seeded floats in place of those that are given, of both signs: of each of several sizes, and of different sizes
    by sample."""
    generator = torch.Generator().manual_seed(1)
    sizes = [torch.full((given.samples,), scale) for scale in _SCALES]
    sizes.append(torch.tensor(_SCALES)[torch.randint(len(_SCALES), (given.samples,), generator=generator)])

    def scaling(size: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda of, old: torch.randn(old.shape, generator=generator) * _along(size[of], old)

    return [given.with_floats(scaling(size)) for size in sizes]


def _along(numbers: Tensor, other: Tensor) -> Tensor:
    """Numbers [m] as [m, 1, …], with as many dimensions as `other`."""
    return numbers.view(-1, *[1] * (other.dim() - 1))


# How far inputs are moved, relative to each: about two units of the dtype in which a dense part computes. Its scores
# may move by `_STEPS` times what that gives, because it rounds at each of its steps, and a sum of n products n times.
_NUDGE = {DenseDtype.FP32: 2**-22, DenseDtype.BF16: 2**-7, DenseDtype.INT8: 2**-22}
_STEPS = 16


class Rounding:
    """By how much scores of one probe may differ, although they are of the same numbers.

    A sigmoid of a sum of terms of 10⁶ turns by much where the sum is rounded in another order. By how much is seen
    where the inputs are moved by as much as rounding moves them.

    Args:
        run: the dense part.
        probe: what it is run on.
        numbers: what it answers.
        dtype: of its weights.
        is_usual: whether the probe's numbers are of the usual size. There, only `allowed` explains a difference, as
            docs/protocol.md promises: what a discontinuous model answers may move by anything.
    """

    def __init__(
        self, run: Run, probe: DenseInputs, numbers: Mapping[str, Numbers], dtype: DenseDtype, *, is_usual: bool
    ) -> None:
        self._run, self._probe, self._numbers, self._dtype = run, probe, numbers, dtype
        self._is_usual = is_usual

    def explains(self, name: str, others: Numbers) -> bool:
        """Whether rounding explains that an output has these numbers instead."""
        numbers = self._numbers[name]
        limit = rounding_limit(numbers, self._dtype)
        if (off := largest_difference(others, numbers)) <= limit:
            return True
        if self._is_usual or name not in self._moved or not np.isfinite(off):
            return False
        return bool((moved(others, numbers) <= limit + _STEPS * self._moved[name]).all())

    @cached_property
    def _moved(self) -> Mapping[str, Numbers]:
        """By how much each number of each output moves, at most, where inputs move by a rounding.

        Empty where two runs of the same inputs differ, as those of random numbers do: then nothing is rounding.
        """
        for _, again in answered(self._run, [self._probe, self._probe]):
            if any(largest_difference(again[name], numbers) > 0 for name, numbers in self._numbers.items()):
                return {}
        generator = torch.Generator().manual_seed(3)
        unit = _NUDGE[self._dtype]
        nudges: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda _, old: old * (1 + unit),
            *[lambda _, old: old * (1 + unit * (2 * torch.rand(old.shape, generator=generator) - 1))] * 3,
        ]
        found: dict[str, Numbers] = {}
        for _, answer in answered(self._run, [self._probe.with_floats(nudge) for nudge in nudges]):
            for name, numbers in answer.items():
                off = np.nan_to_num(moved(numbers, self._numbers[name]), nan=0.0, posinf=0.0)
                found[name] = np.maximum(found.get(name, 0.0), off)
        return found


def probe_mixing(run: Run, given: DenseInputs, dtype: DenseDtype, by_id: Mapping[str, str]) -> str | None:
    """What shows that a dense part lets samples meet; None: nothing was seen.

    What is not seen may be there all the same: `export.batchability.mixed_samples` reads it off the operators.

    Args:
        run: the dense part.
        given: it can be run on it.
        dtype: of its weights.
        by_id: the outputs with a row for each id of a key, and the key of each.
    """
    samples = given.samples
    for probe, together in answered(run, [given, *scaled_probes(given)]):
        rounding = Rounding(run, probe, together, dtype, is_usual=probe is given)
        for what, requests in _other_requests(samples):
            alone = [run(probe.at(chosen)) for chosen in requests]
            for name in together:
                places = [given.places(by_id.get(name), chosen) for chosen in requests]
                found = np.concatenate([each[name] for each in alone])[torch.cat(places).argsort().numpy()]
                if not rounding.explains(name, found):
                    return f"output {name!r} is another one for samples {what}"
    together = run(given)
    nothing = given.with_floats(lambda _, old: torch.full_like(old, torch.nan))
    for sample in (0, samples - 1):
        others = [_with_other(given, probe, sample) for probe in (nothing, *scaled_probes(given))]
        for _, found in answered(run, others):
            for name, numbers in together.items():
                is_other = np.ones(len(numbers), np.bool_)
                is_other[given.places(by_id.get(name), torch.tensor([sample])).numpy()] = False
                # As many samples: the same kernels, and the same bits.
                if not np.array_equal(found[name][is_other], numbers[is_other], equal_nan=True):
                    return f"output {name!r} of a sample depends on the numbers of another one"
    return None


def _with_other(given: DenseInputs, other: DenseInputs, sample: int) -> DenseInputs:
    """What is given, but for the floats of one sample, which are those of `other`."""
    return given.with_floats(lambda of, old, new: torch.where(_along(of != sample, old), old, new), other)


def answered(run: Run, probes: Sequence[DenseInputs]) -> Iterator[tuple[DenseInputs, Mapping[str, Numbers]]]:
    """Probes and their answers, but for those whose numbers a dense part cannot be run on."""
    for probe in probes:
        try:
            found = run(probe)
        except Exception:  # noqa: S112  the model's code may refuse numbers, and torch what it makes of them
            continue
        yield probe, found


def _other_requests(samples: int) -> list[tuple[str, list[Tensor]]]:
    """The same samples in other requests: the places of the samples of each."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(2))
    return [("alone", list(torch.split(torch.arange(samples), split_sizes(samples)))), ("in another order", [order])]
