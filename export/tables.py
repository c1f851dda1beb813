"""The embedding tables of a trained module, as TorchRec's configs describe them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from export.errors import ModelError
from export.modules import Found, dotted, find_collections
from serving.bundle import Pooling

_POOLING = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN}


@dataclass(frozen=True, slots=True)
class TrainedTable:
    """One table of a collection of embedding bags.

    Attributes:
        name: its name in the config; `path.name` where two collections of the module have a table of that name.
        key: its weights in the module's state dict.
        features: what its answers are called: as the KJT key that it reads, or `key@name` for a key that several
            tables read, as TorchRec calls the embeddings it returns for them.
        keys: the KJT key of each feature.
    """

    name: str
    key: str
    rows: int
    dim: int
    pooling: Pooling
    weighted: bool
    features: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """What of a module is served, and what is not.

    Attributes:
        module: the module.
        found: its collections, and what is left out.
        by_collection: the tables of each collection, by its path, in the order TorchRec returns them.
    """

    module: nn.Module
    found: Found
    by_collection: dict[str, tuple[TrainedTable, ...]]

    @property
    def tables(self) -> tuple[TrainedTable, ...]:
        """All of them."""
        return tuple(table for tables in self.by_collection.values() for table in tables)


def collect_tables(module: nn.Module) -> Trained:
    """The tables of every (Fused)EmbeddingBagCollection in `module`.

    Raises:
        ModelError: a collection is not there or not served (`export.modules`), a table is pruned, virtual or
            position-weighted, or a feature has a name that requests cannot carry, or that another has.
    """
    found = find_collections(module)
    configs = {path: _configs(collection) for path, collection in found.collections.items()}
    every = [config for each in configs.values() for config in each]
    tables = Counter(config.name for config in every)
    readers = Counter(key for config in every for key in config.feature_names)
    by_collection = {
        path: tuple(
            _trained_table(path, config, _is_weighted(found.collections[path]), tables[config.name] > 1, readers)
            for config in each
        )
        for path, each in configs.items()
    }
    trained = Trained(module, found, by_collection)
    for name, count in Counter(name for table in trained.tables for name in table.features).items():
        if count > 1:
            raise ModelError(
                f"feature {name!r}: expected different names, got {count} answers of this one: rename it"
            )
    return trained


def _configs(collection: Any) -> list[EmbeddingBagConfig]:
    return [_servable(config) for config in collection.embedding_bag_configs()]


def _is_weighted(collection: Any) -> bool:
    weighted: bool = collection.is_weighted()
    return weighted


def _trained_table(
    path: str, config: EmbeddingBagConfig, weighted: bool, qualified: bool, readers: Counter[str]
) -> TrainedTable:
    name = dotted(path, config.name) if qualified else config.name
    keys = tuple(map(_checked, config.feature_names))
    return TrainedTable(
        name=name,
        key=dotted(path, "embedding_bags", config.name, "weight"),
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        pooling=_POOLING[config.pooling],
        weighted=weighted,
        features=tuple(f"{key}@{name}" if readers[key] > 1 else key for key in keys),
        keys=keys,
    )


def _servable(config: EmbeddingBagConfig) -> EmbeddingBagConfig:
    refused = {
        "not pooled": config.pooling not in _POOLING,
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
