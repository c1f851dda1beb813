"""The requests that a benchmark sends: random ones for a bundle, or captured ones."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput, InputDtype
from serving.bundle.tensor_names import LOOKED_UP
from serving.client import ModelInfo
from serving.client.messages import infer_request
from serving.errors import ConfigurationError, InvalidRequest
from serving.requests.captured import SkippedLines, read_captured
from serving.requests.layout import samples_of, shared_mask
from serving.requests.types import Array, Ids, Lengths, Tensors

# Number of different requests of one size: enough that no cache holds them all, few enough to be made quickly.
_COUNT = 64
# Largest number of ids in all of them together.
_MAX_IDS = 1 << 22
# The bound below which ids are drawn if an id map has no known ids.
_MAX_DRAWN_ID = 1 << 31
# Distance between an id and the next most popular one, as a share of the table.
_STRIDE = 0.618_033_988_75


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often requests contain each id of a table.

    The frequency of the k-th most popular id is proportional to 1 / k^exponent (Zipf's law). With exponent 0 all ids
    are equally frequent.
    """

    exponent: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        """Parse `uniform`, or `zipf:EXPONENT`, such as zipf:1.05.

        Raises:
            ConfigurationError: the text is neither.
        """
        if text == "uniform":
            return cls()
        match = re.fullmatch(r"zipf:([0-9.]+)", text)
        try:
            return cls(float(match[1]))  # type: ignore[index]
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"ids: expected uniform or zipf:EXPONENT, got {text!r}") from error

    def draw(self, random: np.random.Generator, rows: int, count: int) -> Ids:
        """Draw random ids in [0, rows): int64 [count]."""
        if self.exponent == 0:
            return random.integers(0, rows, count)
        # Invert the continuous law, and round to the nearest rank. Exact sums over 10⁷ rows would take too long.
        uniform, power = random.random(count), 1 - self.exponent
        low, high = 0.5, rows + 0.5
        if power == 0:
            drawn = low * (high / low) ** uniform
        else:
            drawn = (low**power + uniform * (high**power - low**power)) ** (1 / power)
        popularity = np.clip(np.rint(drawn), 1, rows).astype(np.int64) - 1
        ids: Ids = popularity * _coprime(rows) % rows
        return ids


def random_requests(
    manifest: Manifest,
    samples: int,
    ids: Distribution,
    pooling_factors: Mapping[str, float],
    seed: int = 0,
    known_ids: Mapping[str, Ids] = MappingProxyType({}),
    *,
    scores: bool = False,
    shared: Collection[str] = (),
) -> list[Tensors]:
    """Make random requests for all keys of `manifest`.

    Args:
        manifest: of the bundle. Its tables say which ids are valid.
        samples: samples of each request.
        ids: how often requests contain each id.
        pooling_factors: mean number of ids in a bag, by key. With 2.3, a bag has 2 or 3 ids.
        seed: of the random numbers.
        known_ids: the ids to draw from, by key, for keys whose ids are not row numbers.
        scores: whether to request all scores instead of embeddings. Dense inputs are in [0, 1); integers are 0 or 1.
        shared: the keys with one bag, and the dense inputs with one row, for all samples.

    Raises:
        ConfigurationError: scores are requested, but the bundle has none.
    """
    part = manifest.dense_part if scores else None
    if scores and part is None:
        raise ConfigurationError("scores: expected a bundle with scores: export the model with --scores")
    random = np.random.default_rng(seed)
    rows = manifest.rows_of_keys
    bag_counts = {key: 1 if key in shared else samples for key in rows}
    longest = manifest.longest_bags
    expected = max(1, int(sum(pooling_factors[key] * count for key, count in bag_counts.items())))
    requests = []
    for _ in range(min(_COUNT, max(4, _MAX_IDS // expected))):
        lengths: dict[str, Lengths] = {}
        for key, count in bag_counts.items():
            bags = np.floor(pooling_factors[key] + random.random(count)).astype(np.int32)
            if key in longest:
                np.minimum(bags, longest[key], out=bags)
            if part is not None and key in part.fixed_lengths:
                bags[:] = part.fixed_lengths[key]
            lengths[key] = bags
        for first, *same_lengths in () if part is None else part.together:
            lengths |= dict.fromkeys(same_lengths, lengths[first])
        counts = {key: int(bags.sum()) for key, bags in lengths.items()}
        values = np.concatenate(
            [_draw_ids(random, ids, known_ids.get(key), rows[key], count) for key, count in counts.items()]
        )
        weights = np.ones(values.size, np.float32) if manifest.weighted else None
        request = Tensors(None, values, np.concatenate([*lengths.values()]), weights, shared=list(shared))
        if part is not None:
            dense_inputs = {}
            for dense in part.inputs:
                by_sample = 1 if dense.name in shared else samples
                row_count = by_sample if dense.key is None else counts[dense.key]
                dense_inputs[dense.name] = _draw_dense(random, dense, row_count)
            request = replace(request, outputs=[output.name for output in part.outputs], dense=dense_inputs)
        requests.append(request)
    return requests


def _draw_dense(random: np.random.Generator, dense: DenseInput, rows: int) -> Array:
    shape = (rows, *dense.shape)
    if dense.dtype is InputDtype.FP32:
        return random.random(shape, np.float32)
    # Larger integers may be outside of an nn.Embedding that takes them.
    return random.integers(0, 2, shape).astype(dense.dtype.numpy)


def _draw_ids(random: np.random.Generator, ids: Distribution, known_ids: Ids | None, rows: int, count: int) -> Ids:
    """Draw random ids in [0, rows), or from `known_ids`: int64 [count]."""
    if known_ids is None or not known_ids.size:
        return ids.draw(random, min(rows, _MAX_DRAWN_ID), count)
    drawn: Ids = known_ids[ids.draw(random, known_ids.size, count)]
    return drawn


def _coprime(rows: int) -> int:
    """A stride that visits every row of a table once: it is coprime to `rows`, and near `_STRIDE` of them."""
    stride = max(1, int(rows * _STRIDE))
    while math.gcd(stride, rows) > 1:
        stride += 1
    return stride


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be sent.

    Attributes:
        tensors: its ids and lengths, and its dense inputs.
        message: its serialized ModelInferRequest.
        samples: B.
    """

    tensors: Tensors
    message: bytes
    samples: int


def prepare(model: str, requests: Sequence[Tensors], info: ModelInfo) -> list[Prepared]:
    """Serialize `requests` for a served model."""
    prepared = []
    for tensors in requests:
        message = infer_request(model, tensors, info).SerializeToString()
        prepared.append(Prepared(tensors, message, _samples(tensors, info)))
    return prepared


def captured_requests(path: Path, info: ModelInfo, skipped: SkippedLines) -> tuple[list[Tensors], int]:
    """Read the requests of a capture file.

    A captured request has no per-id weights. For a weighted model, each id gets a weight of 1.

    Args:
        path: the file.
        info: of the model that is to answer the requests.
        skipped: counts lines that are no captured requests.

    Returns:
        The requests, and how many were left out. A request is left out if its lengths do not fit its features and
        ids, or if the model lacks its dense inputs or outputs.

    Raises:
        ConfigurationError: no request can be sent.
    """
    captured = [request.tensors for request in read_captured(path, skipped, follow=True)]
    requests = [
        replace(tensors, weights=np.ones(tensors.values.size, np.float32) if info.weighted else None)
        for tensors in captured
        if _adds_up(tensors, info) and _has_dense_inputs_and_outputs(info, tensors)
    ]
    if not requests:
        raise ConfigurationError(f"{path}: expected requests, found none that can be sent")
    return requests, len(captured) - len(requests)


def _names(tensors: Tensors, info: ModelInfo) -> Sequence[str]:
    """The keys, or the tables, that a request has lengths for, in order."""
    if tensors.tables is not None:
        return tensors.tables
    return list(info.keys) if tensors.features is None else tensors.features


def _samples(tensors: Tensors, info: ModelInfo) -> int:
    """The samples of a request.

    Raises:
        InvalidRequest: its lengths do not fit its keys or tables.
    """
    names = _names(tensors, info)
    shared = shared_mask(names, [dense.name for dense in info.dense], tensors.shared)
    return samples_of(tensors, names, shared, info.by_id)


def _adds_up(tensors: Tensors, info: ModelInfo) -> bool:
    """Whether the lengths of a request fit its keys or tables, and its ids."""
    names = _names(tensors, info)
    names_of_model = info.keys.keys() if tensors.tables is None else info.tables.keys()
    lengths: Lengths = tensors.lengths  # type: ignore[assignment]
    if not names or not names_of_model >= set(names):
        return False
    try:
        _samples(tensors, info)
    except InvalidRequest:
        return False
    return not (lengths < 0).any() and int(lengths.sum(dtype=np.int64)) == tensors.values.size


def _has_dense_inputs_and_outputs(info: ModelInfo, tensors: Tensors) -> bool:
    """Whether a model has the dense inputs and outputs of a request."""
    inputs, outputs = {dense.name for dense in info.dense}, {*LOOKED_UP, *info.scores}
    return inputs >= tensors.dense.keys() and outputs >= set(tensors.outputs)
