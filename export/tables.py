"""The embedding tables of a trained module, as TorchRec's configs describe them."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table

from export.errors import ModelError
from serving.bundle import Pooling

_POOLING = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN}


@dataclass(frozen=True, slots=True)
class TrainedTable:
    """One table of an EmbeddingBagCollection.

    Attributes:
        key: its weights in the module's state dict.
        features: the names under which TorchRec returns its pooled embeddings: the KJT key, or `key@table`
            for a key that several tables read.
    """

    name: str
    key: str
    rows: int
    dim: int
    pooling: Pooling
    weighted: bool
    features: tuple[str, ...]


def collect_tables(module: nn.Module) -> tuple[TrainedTable, ...]:
    """The tables of every EmbeddingBagCollection in `module`, in the order TorchRec returns them.

    Raises:
        ModelError: there is no collection, two tables or features share a name, or a table is pruned,
            virtual or position-weighted.
    """
    tables = [
        table
        for path, child in module.named_modules()
        if isinstance(child, EmbeddingBagCollection)
        for table in _tables_of(path, child)
    ]
    if not tables:
        raise ModelError(f"{type(module).__name__}: expected an EmbeddingBagCollection in it, found none")
    _expect_unique("table", (table.name for table in tables))
    _expect_unique("feature", (feature for table in tables for feature in table.features))
    return tuple(tables)


def _tables_of(path: str, collection: EmbeddingBagCollection) -> list[TrainedTable]:
    configs = collection.embedding_bag_configs()
    return [
        TrainedTable(
            name=config.name,
            key=".".join(filter(None, (path, "embedding_bags", config.name, "weight"))),
            rows=config.num_embeddings,
            dim=config.embedding_dim,
            pooling=_POOLING[config.pooling],
            weighted=collection.is_weighted(),
            features=tuple(map(_checked, names)),
        )
        for config, names in zip(map(_servable, configs), get_embedding_names_by_table(configs), strict=True)
    ]


def _servable(config: EmbeddingBagConfig) -> EmbeddingBagConfig:
    refused = {
        "pruned": config.num_embeddings_post_pruning is not None,
        "position-weighted": config.need_pos,
        "virtual": config.use_virtual_table,
    }
    for what, is_so in refused.items():
        if is_so:
            raise ModelError(f"table {config.name!r}: expected a plain table, it is {what}: not supported")
    return config


def _checked(feature: str) -> str:
    if not feature or "," in feature:
        raise ModelError(f"feature {feature!r}: expected a name without a comma: requests list names with commas")
    return feature


def _expect_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"{what} {name!r}: expected once, found in two places: rename one of them")
        seen.add(name)
