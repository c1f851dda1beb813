"""Probes of a dense part: inputs whose floats have many sizes, and the answers to them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from export.batchability.differences import Numbers
from export.capture.graph_inputs import DenseInputs

# Runs a dense part for B samples: outputs [B, …] by name.
Run = Callable[[DenseInputs], Mapping[str, Numbers]]
# Activations of a trained model are rarely so small or so large. Raw features, such as a price or an age in seconds,
# may be.
_SCALES = (1e-3, 1.0, 1e3, 1e6)
# The samples of the first requests that a probe is split into.
_SPLIT = (1, 3)


def split_sizes(samples: int) -> list[int]:
    """The samples of each request that a probe is split into, to compare merged requests with single ones."""
    return [*_SPLIT, samples - sum(_SPLIT)]


def scaled_probes(inputs: DenseInputs) -> list[DenseInputs]:
    """The inputs with seeded floats of both signs: all of one size, for each of several sizes; and of mixed sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = [torch.full((inputs.samples,), scale) for scale in _SCALES]
    sizes.append(torch.tensor(_SCALES)[torch.randint(len(_SCALES), (inputs.samples,), generator=generator)])

    def randn(size: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Random numbers in place of floats, given the sample of each row."""
        return lambda samples, floats: torch.randn(floats.shape, generator=generator) * column(size[samples], floats)

    return [inputs.with_floats(randn(size)) for size in sizes]


def run_probes(run: Run, probes: Sequence[DenseInputs]) -> Iterator[tuple[DenseInputs, Mapping[str, Numbers]]]:
    """Each probe with its answer. Probes that the dense part refuses are skipped."""
    for probe in probes:
        try:
            answer = run(probe)
        except Exception:  # noqa: S112  the model's code may refuse numbers, and so may torch
            continue
        yield probe, answer


def column(numbers: Tensor, other: Tensor) -> Tensor:
    """Numbers [m] as [m, 1, …], with as many dimensions as `other`."""
    return numbers.view(-1, *[1] * (other.dim() - 1))
