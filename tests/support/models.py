"""Trained modules for the tests, and requests for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from serving.bundle.tables import Pooling, Table
from serving.model.settings import ServingSettings

Bags = list[list[int]]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Spec:
    name: str
    rows: int
    dim: int
    pooling: str
    features: tuple[str, ...]


MIXED = (
    Spec("user", 500, 16, "SUM", ("user_id",)),
    Spec("item", 300, 32, "MEAN", ("item_id", "recent_items")),
    Spec("genre", 20, 8, "SUM", ("genres",)),
    Spec("word", 1000, 24, "MEAN", ("words",)),
)
# Every dtype at once, and both id policies.
MIXED_CONFIG = ExportConfig(
    dtype={"user": WeightDtype.INT8, "item": WeightDtype.INT4, "genre": WeightDtype.FP16, "word": WeightDtype.INT2},
    id_policy={"word": IdPolicy.ZERO},
)
MEAN = (Spec("a", 50, 8, "MEAN", ("x", "y")), Spec("b", 10, 12, "MEAN", ("z",)))
SUM = (Spec("a", 50, 8, "SUM", ("x", "y")), Spec("b", 10, 12, "SUM", ("z",)))


def randomized(module: M) -> M:
    """`module` with numbers of a normal distribution, which torch's seed says."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def collection(specs: Sequence[Spec] = MIXED, *, weighted: bool = False, seed: int = 0) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    ebc = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=spec.name,
                num_embeddings=spec.rows,
                embedding_dim=spec.dim,
                feature_names=list(spec.features),
                pooling=PoolingType[spec.pooling],
            )
            for spec in specs
        ],
        is_weighted=weighted,
    )
    return randomized(ebc)


def summed() -> EmbeddingBagCollection:
    """For `--model`."""
    return collection(SUM)


def float_tables(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    return {
        key.split(".")[-2]: tensor.numpy() for key, tensor in module.state_dict().items() if key.endswith(".weight")
    }


def table_of(specs: Sequence[Spec]) -> dict[str, Spec]:
    return {feature: spec for spec in specs for feature in spec.features}


def random_bags(
    random: np.random.Generator,
    specs: Sequence[Spec],
    samples: int,
    features: Sequence[str] | None = None,
    longest: int = 6,
) -> dict[str, Bags]:
    tables = table_of(specs)
    return {
        name: [
            random.integers(0, tables[name].rows, size).tolist() for size in random.integers(0, longest + 1, samples)
        ]
        for name in features or tables
    }


def flat(bags: Mapping[str, Bags]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """(values, lengths), feature-major."""
    every = [bag for column in bags.values() for bag in column]
    values = np.array([id_ for bag in every for id_ in bag], np.int64)
    return values, np.array([len(bag) for bag in every], np.int32)


def exported(folder: Path, weighted: bool = False, **settings: Any) -> Path:
    """`SUM` published as `m` in the repository `folder`/r, to be served with these settings."""
    config = ExportConfig(serving=ServingSettings(**settings))
    return export_model(collection(SUM, weighted=weighted), folder / "r", "m", config)


def export_shared(repository: Path) -> None:
    """The models of the fixture `repository`."""
    export_model(collection(MIXED), repository, "mixed", MIXED_CONFIG)
    export_model(collection(SUM, weighted=True), repository, "weighted")
    export_model(collection(MIXED), repository, "half", ExportConfig(output_dtype=OutputDtype.FP16))
    sharding = Sharding(ranks=4, ranks_per_host=2, types={"*": "grid_shard", "genre": "data_parallel"})
    export_model(collection(MIXED), repository, "sharded", replace(MIXED_CONFIG, sharding=sharding))
    export_model(collection(MIXED), repository, "gated", MIXED_CONFIG)


def int8_table(name: str, rows: int, dim: int) -> Table:
    """A table of a manifest."""
    return Table(
        name=name,
        rows=rows,
        dim=dim,
        pooling=Pooling.SUM,
        weighted=False,
        dtype=WeightDtype.INT8,
        id_policy=IdPolicy.ERROR,
    )
