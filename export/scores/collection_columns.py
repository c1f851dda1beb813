"""The columns of each collection in the embeddings of a bundle."""

from torch import nn
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from export.capture.stub_collections import Columns
from export.trained.tables import Trained
from export.trained.wrapped_collections import inner_of, is_sequence
from serving.bundle.manifest import Manifest


def collection_columns(trained: Trained, manifest: Manifest) -> dict[nn.Module, Columns]:
    """The columns of each collection in the embeddings of the bundle."""
    spans = manifest.pooled_columns
    dims = {
        feature.name: table.dim for feature, table in zip(manifest.features, manifest.feature_tables, strict=True)
    }
    columns = {}
    for path, tables in trained.by_collection.items():
        collection = trained.collections[path]
        _, inner = inner_of(collection)
        configs = inner.embedding_configs() if is_sequence(collection) else inner.embedding_bag_configs()
        features = [name for table in tables for name in table.features]
        columns[collection] = Columns(
            names=[name for names in get_embedding_names_by_table(configs) for name in names],
            features=features,
            keys=[key for table in tables for key in table.keys],
            dims=[dims[name] for name in features],
            spans=[] if is_sequence(collection) else [spans[name] for name in features],
        )
    return columns
