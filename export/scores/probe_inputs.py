"""Probes of a dense part: a request for scores, and the inputs that the dense part takes for it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from export.capture.bags import Bags, bags_of
from export.capture.graph_inputs import DenseInputs
from export.trained.probe_request import kjt_of, make_probe
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput, DensePart, InputDtype
from serving.requests.types import Ids, Tensors

ByFeature = Mapping[str, npt.NDArray[Any]]


def probe_request(manifest: Manifest, part: DensePart | None, known_ids: Mapping[str, Ids]) -> Tensors:
    """A request for scores, where no example of a call is known.

    Where the dense part takes ids or rows, each bag has one id: such a model may fail for more ids of a key than it
    was trained with.

    Args:
        manifest: of the bundle.
        part: its dense part. None: its scores are made of pooled embeddings.
        known_ids: known ids of each key with a map.
    """
    if part is None or not part.jagged:
        return make_probe(manifest, known_ids)
    keys = manifest.key_of_feature
    lengths = {part.key_of(jagged, keys): 1 for jagged in part.jagged}
    return make_probe(manifest, known_ids, lengths | part.fixed_lengths)


def request_of_bags(manifest: Manifest, bags: Bags) -> Tensors:
    """A request for all keys of a bundle."""
    bags_in_order = [bags[key] for key in manifest.keys]
    values = torch.cat([bag.ids for bag in bags_in_order]).long().numpy()
    lengths = torch.cat([bag.lengths for bag in bags_in_order]).int().numpy()
    if not manifest.weighted:
        return Tensors(None, values, lengths)
    weights = [torch.ones(len(bag.ids)) if bag.weights is None else bag.weights.float() for bag in bags_in_order]
    return Tensors(None, values, lengths, torch.cat(weights).numpy())


def probe_inputs(manifest: Manifest, request: Tensors, part: DensePart | Sequence[DenseInput]) -> DenseInputs:
    """The inputs of a dense part for a request, with random embeddings and rows.

    Args:
        manifest: of the bundle.
        request: for all keys.
        part: the dense part, or the dense inputs of one that takes no ids or rows.
    """
    if isinstance(part, DensePart):
        dense_inputs, fixed, groups = part.inputs, part.fixed_lengths, part.together
    else:
        dense_inputs, fixed, groups = tuple(part), {}, ()
    generator = torch.Generator().manual_seed(0)
    samples = request.lengths.size // len(manifest.keys)
    bags = bags_of(kjt_of(manifest, request, torch.device("cpu")))
    width = 0
    rows: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    for feature, table in zip(manifest.features, manifest.feature_tables, strict=True):
        if table.is_sequence:
            keys[feature.name] = feature.key
            rows[feature.name] = torch.randn(len(bags[feature.key].ids), table.dim, generator=generator)
        else:
            width += table.dim
    embeddings = torch.randn(samples, width, generator=generator)
    first = {key: group[0] for group in groups for key in group}
    inputs = DenseInputs(embeddings, (), bags, rows, keys, fixed, first)
    return with_dense(inputs, dense_inputs, _random_dense(dense_inputs, samples, bags))


def request_inputs(
    manifest: Manifest, dense_inputs: Sequence[DenseInput], request: Tensors, dense: Mapping[str, npt.NDArray[Any]]
) -> DenseInputs:
    """The inputs of a dense part for a request, with embeddings and rows that are empty.

    Args:
        manifest: of the bundle.
        dense_inputs: those of the dense part.
        request: ids of all keys, in the manifest's order.
        dense: the dense inputs by name, in their dtypes.
    """
    bags = bags_of(kjt_of(manifest, request, torch.device("cpu")))
    samples = request.lengths.size // len(manifest.keys)
    sequences = zip(manifest.features, manifest.feature_tables, strict=True)
    keys = {feature.name: feature.key for feature, table in sequences if table.is_sequence}
    inputs = DenseInputs(torch.empty(samples, 0), (), bags, dict.fromkeys(keys, torch.empty(0)), keys)
    return with_dense(inputs, dense_inputs, {name: torch.from_numpy(array) for name, array in dense.items()})


def with_dense(inputs: DenseInputs, dense_inputs: Sequence[DenseInput], tensors: Mapping[str, Tensor]) -> DenseInputs:
    """The inputs of a dense part with other dense inputs.

    Args:
        inputs: of the dense part.
        dense_inputs: those with a row for each sample, and those with a row for each id of a key.
        tensors: by name.
    """
    keys = {dense.name: dense.key for dense in dense_inputs if dense.key is not None}
    by_id = {name: replace(inputs.bags[key], ids=tensors[name], weights=None) for name, key in keys.items()}
    by_sample = tuple(tensors[dense.name] for dense in dense_inputs if dense.key is None)
    return replace(inputs, dense=by_sample, bags={**inputs.bags, **by_id}, keys={**inputs.keys, **keys})


def with_embeddings(inputs: DenseInputs, answer: ByFeature) -> DenseInputs:
    """The inputs of a dense part with the embeddings and rows of an answer, by feature, to their request."""
    pooled = [numbers for name, numbers in answer.items() if name not in inputs.keys]
    embeddings = np.concatenate(pooled, axis=1) if pooled else np.zeros((inputs.samples, 0), np.float32)
    rows = {name: torch.from_numpy(answer[name]) for name in inputs.rows}
    return replace(inputs, embeddings=torch.from_numpy(embeddings), rows=rows)


def _random_dense(dense_inputs: Sequence[DenseInput], samples: int, bags: Bags) -> dict[str, Tensor]:
    """Seeded dense inputs by name: FP32 in [0, 1), other dtypes 0 or 1."""
    generator = torch.Generator().manual_seed(0)

    def random(dense: DenseInput) -> Tensor:
        shape = (samples if dense.key is None else len(bags[dense.key].ids), *dense.shape)
        if dense.dtype is InputDtype.FP32:
            return torch.rand(shape, generator=generator)
        integers = torch.randint(0, 2, shape, generator=generator)
        return torch.from_numpy(integers.numpy().astype(dense.dtype.numpy))

    return {dense.name: random(dense) for dense in dense_inputs}
