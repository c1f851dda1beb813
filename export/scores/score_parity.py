"""Compare the scores of a model, of its dense part, and of what TorchScript compiled."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from export.batchability.differences import Numbers, largest_difference, rounding_limit, scale_of
from export.batchability.probes import Run, run_probes, split_sizes
from export.batchability.rounding import Rounding
from export.capture.graph_inputs import DenseInputs
from export.errors import ParityError
from export.scores.dense_subgraph import WAY_OUT, DenseSubgraph
from serving.bundle.scores import SCORE_DTYPES, DenseDtype, ScoreOutput, ScoreParity


def expect_model_scores(
    model_name: str, eager: Mapping[str, Tensor], run: Run, probe: DenseInputs, *, is_usual: bool
) -> None:
    """Refuse a model whose dense part answers a probe differently than the model itself.

    Args:
        model_name: the class of the model.
        eager: what it answers, by output.
        run: runs the dense part.
        probe: inputs of the dense part.
        is_usual: as of `Rounding`.

    Raises:
        ParityError: naming the output.
    """
    scores = run(probe)
    rounding = Rounding(run, probe, scores, DenseDtype.FP32, is_usual=is_usual)
    for name, tensor in eager.items():
        numbers = tensor.numpy()
        if not rounding.explains(name, numbers):
            cause = (
                "rounding of its inputs alone moves it as far, so the numbers are mostly rounding, as a sum has that "
                "is 0 in exact arithmetic: return another output in its place"
                if rounding.moves_as_far(name, numbers)
                else "something that a graph of its forward does not have changes it, such as a hook, autocast, "
                "random numbers, += on a part of a tensor, or the fast path of nn.TransformerEncoder at padding "
                "(enable_nested_tensor=False)"
            )
            raise ParityError(
                f"{model_name}: output {name!r}: what follows the collections answers differently from the "
                f"model, by {largest_difference(scores[name], numbers):.3g}, where the largest |number| is "
                f"{scale_of(numbers):.3g}: {cause}: {WAY_OUT}"
            )


def expect_variation_scores(
    model_name: str, variation: str, eager: Mapping[str, Tensor], scores: Mapping[str, Numbers]
) -> None:
    """Refuse a model whose dense part answers a variation of the example differently than the model itself.

    Args:
        model_name: the class of the model.
        variation: how the request differs from the example.
        eager: what the model answers, by output.
        scores: what its dense part answers.

    Raises:
        ParityError: naming the output and the variation.
    """
    for name, tensor in eager.items():
        numbers = tensor.numpy()
        if numbers.size == scores[name].size:  # .squeeze() may remove the dimension of one sample
            numbers = numbers.reshape(scores[name].shape)
        difference = largest_difference(scores[name], numbers)
        if difference > rounding_limit(numbers, DenseDtype.FP32):
            raise ParityError(
                f"{model_name}: output {name!r}: its forward does something else for a request "
                f"{variation}, by {difference:.3g}: expected the same steps for any number of samples and ids, also "
                f"at padding (nn.TransformerEncoder: enable_nested_tensor=False): {WAY_OUT}"
            )


def measure_outputs(
    subgraph: DenseSubgraph, run: Run, serve: Run, probes: Sequence[DenseInputs], dtype: DenseDtype
) -> tuple[ScoreOutput, ...]:
    """The outputs of a dense part, with their parity for the first probe.

    Args:
        subgraph: has the outputs.
        run: runs the dense part in FP32.
        serve: runs what TorchScript compiled, with weights of `dtype`.
        probes: inputs of the dense part.
        dtype: of the weights that serve.

    Raises:
        ParityError: the compiled dense part answers differently, in FP32 for any probe; or its answer to the first
            probe is not finite where the other is.
    """
    answers = [(run(probe), serve(probe)) for probe in probes]
    compared = answers if dtype is DenseDtype.FP32 else answers[:1]
    for probe, (exact, served) in zip(probes, compared, strict=False):
        rounding = Rounding(run, probe, exact, dtype, is_usual=probe is probes[0])
        for name, numbers in exact.items():
            difference = largest_difference(served[name], numbers)
            is_fp32 = dtype is DenseDtype.FP32
            if not (rounding.explains(name, served[name]) if is_fp32 else np.isfinite(difference)):
                raise ParityError(
                    f"{subgraph.model_name}: output {name!r}: compiled, it is off by {difference:.3g}, where the "
                    f"largest is {scale_of(numbers):.3g}"
                )
    exact, served = answers[0]
    probe = probes[0]
    parts = [
        serve(probe.select(part)) for part in torch.split(torch.arange(probe.samples), split_sizes(probe.samples))
    ]
    outputs = []
    for name, numbers in exact.items():
        alone = np.concatenate([part[name] for part in parts])
        parity = ScoreParity(
            scale=scale_of(numbers),
            scripted=largest_difference(served[name], numbers),
            merged=largest_difference(served[name], alone),
        )
        outputs.append(
            ScoreOutput(name, numbers.shape[1:], parity, subgraph.by_id.get(name), SCORE_DTYPES[numbers.dtype])
        )
    return tuple(outputs)


def expect_same_scores(run: Run, other: Run, requests: Sequence[DenseInputs], dtype: DenseDtype) -> None:
    """Refuse a format of a dense part that answers differently than the dense part.

    Args:
        run: runs the dense part.
        other: runs the format.
        requests: inputs. Those that the dense part refuses are skipped.
        dtype: of the weights.

    Raises:
        ParityError: naming the output.
    """
    for request, expected in run_probes(run, requests):
        scores = other(request)
        rounding = Rounding(run, request, expected, dtype, is_usual=False)
        for name, numbers in expected.items():
            if not rounding.explains(name, scores[name]):
                difference = largest_difference(scores[name], numbers)
                raise ParityError(f"output {name!r}: it is off by {difference:.3g} for {request.samples} samples")
