"""The requests that a benchmark sends: random ones for a bundle, or captured ones."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput, InputDtype
from serving.client import ModelInfo
from serving.client.messages import infer_request
from serving.errors import ConfigurationError, InvalidRequest
from serving.requests.captured import PassedOver, read_captured
from serving.requests.layout import samples_of, shared_mask
from serving.requests.types import LOOKED_UP, Array, Ids, Lengths, Tensors

# Number of different requests of one size: enough that no cache holds them all, few enough to be made quickly.
_COUNT = 64
# Most ids in all of them.
_IDS_IN_ALL = 1 << 22
# Ids are drawn below this where an id map knows no ids.
_MOST_DRAWN = 1 << 31
# Distance between an id and the next most popular one, as a share of the table.
_STRIDE = 0.618_033_988_75


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often each id of a table is asked for.

    The k-th most popular id is asked for in proportion to 1 / k^exponent: Zipf's law. With exponent 0 all ids are
    asked for equally often.
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
        """Random ids in [0, rows): int64 [count]."""
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
    known: Mapping[str, Ids] = MappingProxyType({}),
    *,
    scores: bool = False,
) -> list[Tensors]:
    """Random requests for all keys of `manifest`.

    Args:
        manifest: of the bundle. Its tables say which ids are valid.
        samples: samples of each request.
        ids: how often each id is asked for.
        pooling_factors: mean number of ids in a bag, by key. With 2.3, a bag has 2 or 3 ids.
        seed: of the random numbers.
        known: the ids to draw from, by key, for keys whose ids are not row numbers.
        scores: whether to ask for all scores, with dense inputs in [0, 1) instead of embeddings; integers are 0 or 1.

    Raises:
        ConfigurationError: the bundle has no scores to ask for.
    """
    part = manifest.dense_part if scores else None
    if scores and part is None:
        raise ConfigurationError("scores: expected a bundle with scores: export the model with --scores")
    random = np.random.default_rng(seed)
    rows = manifest.rows_of_keys
    factors = np.array([pooling_factors[key] for key in rows])
    longest = manifest.longest_bags
    expected = max(1, int(factors.sum() * samples))
    requests = []
    for _ in range(min(_COUNT, max(4, _IDS_IN_ALL // expected))):
        lengths = np.floor(factors[:, np.newaxis] + random.random((factors.size, samples))).astype(np.int32)
        for bags, key in zip(lengths, rows, strict=True):
            if key in longest:
                np.minimum(bags, longest[key], out=bags)
            if part is not None and key in part.fixed_lengths:
                bags[:] = part.fixed_lengths[key]
        at = {key: number for number, key in enumerate(rows)}
        for key, *others in () if part is None else part.together:
            for other in others:
                lengths[at[other]] = lengths[at[key]]
        values = np.concatenate(
            [
                _drawn(random, ids, known.get(key), height, bags.sum())
                for (key, height), bags in zip(rows.items(), lengths, strict=True)
            ]
        )
        weights = np.ones(values.size, np.float32) if manifest.weighted else None
        request = Tensors(None, values, lengths.ravel(), weights)
        if part is not None:
            counts = dict(zip(rows, lengths.sum(axis=1).tolist(), strict=True))
            dense = {
                input_.name: _dense(random, input_, samples if input_.key is None else counts[input_.key])
                for input_ in part.inputs
            }
            request = replace(request, outputs=[output.name for output in part.outputs], dense=dense)
        requests.append(request)
    return requests


def _dense(random: np.random.Generator, of: DenseInput, rows: int) -> Array:
    shape = (rows, *of.shape)
    if of.dtype is InputDtype.FP32:
        return random.random(shape, np.float32)
    # Larger ones may be outside of an nn.Embedding that takes them.
    return random.integers(0, 2, shape).astype(of.dtype.numpy)


def _drawn(random: np.random.Generator, ids: Distribution, known: Ids | None, height: int, count: int) -> Ids:
    """Random ids in [0, height), or among the known ones: int64 [count]."""
    if known is None or not known.size:
        return ids.draw(random, min(height, _MOST_DRAWN), count)
    drawn: Ids = known[ids.draw(random, known.size, count)]
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


def captured_requests(path: Path, info: ModelInfo, passed_over: PassedOver) -> tuple[list[Tensors], int]:
    """The requests of a captured file.

    A captured request has no per-id weights. For a weighted model, each id gets a weight of 1.

    Args:
        path: the file.
        info: of the model that is to answer the requests.
        passed_over: counts lines that are no captured requests.

    Returns:
        The requests, and how many were left out. A request is left out if its lengths do not fit its features and
        ids, or if the model lacks its dense inputs or outputs.

    Raises:
        ConfigurationError: no request can be sent.
    """
    captured = [each.tensors for each in read_captured(path, passed_over, follow=True)]
    requests = [
        replace(each, weights=np.ones(each.values.size, np.float32) if info.weighted else None)
        for each in captured
        if _adds_up(each, info) and _is_known(each, info)
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
    shared = shared_mask(names, [each.name for each in info.dense], tensors.shared)
    return samples_of(tensors, names, shared, info.by_id)


def _adds_up(tensors: Tensors, info: ModelInfo) -> bool:
    names = _names(tensors, info)
    known = info.keys.keys() if tensors.tables is None else info.tables.keys()
    lengths: Lengths = tensors.lengths  # type: ignore[assignment]
    if not names or not known >= set(names):
        return False
    try:
        _samples(tensors, info)
    except InvalidRequest:
        return False
    return not (lengths < 0).any() and int(lengths.sum(dtype=np.int64)) == tensors.values.size


def _is_known(tensors: Tensors, info: ModelInfo) -> bool:
    """Whether the model has the dense inputs and outputs of a request."""
    dense, outputs = {each.name for each in info.dense}, {*LOOKED_UP, *info.scores}
    return dense >= tensors.dense.keys() and outputs >= set(tensors.outputs)
