"""The embedding tables of a trained module, from TorchRec's configs."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from export.errors import ModelError
from export.trained.feature_processors import position_weights_of
from export.trained.find_collections import FoundCollections, find_collections
from export.trained.managed_collision import TrainedIdMap, id_maps_of
from export.trained.module_paths import dotted
from export.trained.wrapped_collections import inner_of, is_sequence
from serving.bundle.tables import Pooling, is_name

_POOLING = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN, PoolingType.NONE: Pooling.NONE}


@dataclass(frozen=True, slots=True)
class PositionWeights:
    """The position weights of a feature, from a feature processor.

    Attributes:
        key: the key of the weights in the module's state dict. None: every weight is 1.
        count: the number of weights.
    """

    key: str | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class TrainedTable:
    """One table of an EmbeddingBagCollection or EmbeddingCollection.

    Attributes:
        name: its name in the config; `path.name` if two collections have a table of that name.
        key: the key of its rows in the module's state dict.
        rows: the number of rows.
        dim: the number of columns.
        pooling: SUM or MEAN; NONE in an EmbeddingCollection.
        weighted: whether its rows are weighted when they are pooled.
        features: the names of its features: the KJT key that the feature reads, or `key@name` if several tables read
            that key, as in TorchRec.
        keys: the KJT key of each feature.
        position_weights: of each feature. None: the collection has no feature processor.
        id_map: the module that remaps its ids. None: ids are row numbers.
    """

    name: str
    key: str
    rows: int
    dim: int
    pooling: Pooling
    weighted: bool
    features: tuple[str, ...]
    keys: tuple[str, ...]
    position_weights: tuple[PositionWeights, ...] | None = None
    id_map: TrainedIdMap | None = None

    @property
    def float_bytes(self) -> int:
        """Bytes of all rows in FP32."""
        return 4 * self.rows * self.dim


@dataclass(frozen=True, slots=True)
class Trained(FoundCollections):
    """The collections of a trained module, with their tables.

    Attributes:
        by_collection: the tables of each collection, by the collection's path, in TorchRec's order.
    """

    by_collection: dict[str, tuple[TrainedTable, ...]]

    @property
    def tables(self) -> tuple[TrainedTable, ...]:
        """The tables of all collections."""
        return tuple(table for tables in self.by_collection.values() for table in tables)


def collect_tables(module: nn.Module, *, trace: bool = True) -> Trained:
    """Find the tables of every (Fused, FeatureProcessed, ManagedCollision)EmbeddingBagCollection and
    (Fused, ManagedCollision)EmbeddingCollection.

    Args:
        module: the module.
        trace: as `find_collections`.

    Raises:
        ModelError: there is no collection, or one that is not served (`find_collections`); a table is pruned,
            virtual or position-weighted; or the name of a table or feature cannot be listed, or is used twice.
    """
    served = find_collections(module, trace=trace)
    configs = {path: _configs(collection) for path, collection in served.collections.items()}
    all_configs = [config for of_collection in configs.values() for config in of_collection]
    tables = Counter(config.name for config in all_configs)
    readers = Counter(key for config in all_configs for key in config.feature_names)
    by_collection = {
        path: tuple(
            _trained_table(path, config, served.collections[path], tables[config.name] > 1, readers)
            for config in of_collection
        )
        for path, of_collection in configs.items()
    }
    trained = Trained(served.module, served.collections, served.entries, served.left_out, by_collection)
    for name, count in Counter(name for table in trained.tables for name in table.features).items():
        if count > 1:
            raise ModelError(
                f"feature {name!r}: expected different names, got {count} features of this name: rename one"
            )
    return trained


def _configs(collection: Any) -> list[BaseEmbeddingConfig]:
    _, inner = inner_of(collection)
    configs = inner.embedding_configs() if is_sequence(collection) else inner.embedding_bag_configs()
    return [_servable(config) for config in configs]


def _trained_table(
    path: str, config: BaseEmbeddingConfig, collection: Any, qualified: bool, readers: Counter[str]
) -> TrainedTable:
    inner_path, inner = inner_of(collection)
    modules = "embeddings" if is_sequence(collection) else "embedding_bags"
    name = dotted(path, config.name) if qualified else config.name
    keys = tuple(_checked("feature", key) for key in config.feature_names)
    return TrainedTable(
        name=_checked("table", name),
        key=dotted(path, inner_path, modules, config.name, "weight"),
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        pooling=_POOLING[config.pooling] if isinstance(config, EmbeddingBagConfig) else Pooling.NONE,
        weighted=not is_sequence(collection) and inner.is_weighted(),
        features=tuple(f"{key}@{name}" if readers[key] > 1 else key for key in keys),
        keys=keys,
        position_weights=_position_weights(path, collection, keys),
        id_map=id_maps_of(path, collection).get(config.name),
    )


def _position_weights(path: str, collection: Any, keys: tuple[str, ...]) -> tuple[PositionWeights, ...] | None:
    """The position weights of each key; None without a feature processor."""
    if not isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        return None
    by_key = {
        key: PositionWeights(dotted(path, name), weights.numel())
        for key, (name, weights) in position_weights_of(collection).items()
    }
    return tuple(by_key.get(key, PositionWeights()) for key in keys)


def _servable(config: BaseEmbeddingConfig) -> BaseEmbeddingConfig:
    refused = {
        "not pooled": isinstance(config, EmbeddingBagConfig) and config.pooling is PoolingType.NONE,
        "pruned": config.num_embeddings_post_pruning is not None,
        "position-weighted": config.need_pos,
        "virtual": config.use_virtual_table,
    }
    for what, is_so in refused.items():
        if is_so:
            raise ModelError(f"table {config.name!r}: expected a plain table, it is {what}: not supported")
    return config


def _checked(what: str, name: str) -> str:
    if not is_name(name):
        raise ModelError(
            f"{what} {name!r}: expected a name without commas, which requests list names with, without control "
            "characters, and in UTF-8, which has no lone surrogates"
        )
    return name
