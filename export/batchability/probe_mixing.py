"""Find outputs that depend on the other samples of a batch, by running a dense part on probes.

Probes cannot show every dependency. `export.batchability.find_mixing` looks for them in the graph.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from export.batchability.probes import Run, column, run_probes, scaled_probes, split_sizes
from export.batchability.rounding import Rounding
from export.capture.graph_inputs import DenseInputs
from serving.bundle.scores import DenseDtype


def probe_mixing(run: Run, inputs: DenseInputs, dtype: DenseDtype, by_id: Mapping[str, str]) -> str | None:
    """Describe an output that depends on other samples, or return None if the probes show none.

    Args:
        run: runs the dense part.
        inputs: inputs that it can be run on.
        dtype: of its weights.
        by_id: the key of each output with a row for each id of a key.
    """
    for probe, together in run_probes(run, [inputs, *scaled_probes(inputs)]):
        rounding = Rounding(run, probe, together, dtype, is_usual=probe is inputs)
        for description, requests in _other_requests(inputs.samples):
            answers = [run(probe.select(samples)) for samples in requests]
            for name in together:
                rows = torch.cat([inputs.row_indices(by_id.get(name), samples) for samples in requests])
                alone = np.concatenate([answer[name] for answer in answers])[rows.argsort().numpy()]
                if not rounding.explains(name, alone):
                    return f"output {name!r} differs for samples {description}"
    return _depends_on_neighbour(run, inputs, by_id)


def _depends_on_neighbour(run: Run, inputs: DenseInputs, by_id: Mapping[str, str]) -> str | None:
    """Describe an output that changes for all samples if the floats of one sample change, or return None."""
    together = run(inputs)
    with_nan = inputs.with_floats(lambda _, floats: torch.full_like(floats, torch.nan))
    for sample in (0, inputs.samples - 1):
        probes = [_with_sample_of(inputs, other, sample) for other in (with_nan, *scaled_probes(inputs))]
        for _, answer in run_probes(run, probes):
            for name, numbers in together.items():
                is_other_sample = np.ones(len(numbers), np.bool_)
                is_other_sample[inputs.row_indices(by_id.get(name), torch.tensor([sample])).numpy()] = False
                # The number of samples is the same, and so are the kernels: the bits must be equal.
                if not np.array_equal(answer[name][is_other_sample], numbers[is_other_sample], equal_nan=True):
                    return f"output {name!r} of a sample depends on the numbers of another one"
    return None


def _with_sample_of(inputs: DenseInputs, other: DenseInputs, sample: int) -> DenseInputs:
    """The inputs with the floats of one sample taken from `other`."""

    def choose(samples: Tensor, floats: Tensor, other_floats: Tensor) -> Tensor:
        return torch.where(column(samples != sample, floats), floats, other_floats)

    return inputs.with_floats(choose, other)


def _other_requests(samples: int) -> list[tuple[str, list[Tensor]]]:
    """Other ways to send the same samples, with a description: the numbers of the samples of each request."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(2))
    return [("alone", list(torch.split(torch.arange(samples), split_sizes(samples)))), ("in another order", [order])]
