"""The embedding tables of a trained module, as TorchRec's configs describe them."""

from collections import Counter
from dataclasses import dataclass

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from export.errors import ModelError
from serving.bundle import Pooling

_COLLECTIONS = (EmbeddingBagCollection, FusedEmbeddingBagCollection)
_POOLING = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN}


@dataclass(frozen=True, slots=True)
class TrainedTable:
    """One table of a collection of embedding bags.

    Attributes:
        name: its name in the config; `path.name` where two collections of the module have a table of that name.
        key: its weights in the module's state dict.
        features: the KJT keys that read it; `key@name` for a key that several tables read, as TorchRec calls
            the embeddings it returns for them.
    """

    name: str
    key: str
    rows: int
    dim: int
    pooling: Pooling
    weighted: bool
    features: tuple[str, ...]


def collect_tables(module: nn.Module) -> tuple[TrainedTable, ...]:
    """The tables of every (Fused)EmbeddingBagCollection in `module`, in the order TorchRec returns them.

    Raises:
        ModelError: there is no collection, a table is pruned, virtual or position-weighted, or a feature has a
            name that requests cannot carry.
    """
    found = [
        (path, config, collection.is_weighted())
        for path, collection in module.named_modules()
        if isinstance(collection, _COLLECTIONS)
        for config in collection.embedding_bag_configs()
    ]
    if not found:
        raise ModelError(f"{type(module).__name__}: expected an EmbeddingBagCollection in it, found none")
    tables = Counter(config.name for _, config, _ in found)
    readers = Counter(feature for _, config, _ in found for feature in config.feature_names)
    return tuple(
        _trained_table(path, _servable(config), weighted, tables[config.name] > 1, readers)
        for path, config, weighted in found
    )


def _trained_table(
    path: str, config: EmbeddingBagConfig, weighted: bool, qualified: bool, readers: Counter[str]
) -> TrainedTable:
    name = _dotted(path, config.name) if qualified else config.name
    features = (f"{each}@{name}" if readers[each] > 1 else each for each in config.feature_names)
    return TrainedTable(
        name=name,
        key=_dotted(path, "embedding_bags", config.name, "weight"),
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        pooling=_POOLING[config.pooling],
        weighted=weighted,
        features=tuple(map(_checked, features)),
    )


def _dotted(*parts: str) -> str:
    return ".".join(filter(None, parts))


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
