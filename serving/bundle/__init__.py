"""The bundle: what export writes and serving loads, and the format that both agree on (docs/bundle.md)."""

from serving.bundle.formats import WeightDtype
from serving.bundle.load import Bundle, open_bundle, verify_digests
from serving.bundle.manifest import Agreement, Manifest, Parity
from serving.bundle.plan import Plan, Rank, Shard, ShardingType
from serving.bundle.tables import DefaultRow, Feature, IdPolicy, OutputDtype, Pooling, Table

__all__ = [
    "Agreement",
    "Bundle",
    "DefaultRow",
    "Feature",
    "IdPolicy",
    "Manifest",
    "OutputDtype",
    "Parity",
    "Plan",
    "Pooling",
    "Rank",
    "Shard",
    "ShardingType",
    "Table",
    "WeightDtype",
    "open_bundle",
    "verify_digests",
]
