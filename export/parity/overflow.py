"""Notes on sums that may be beyond FP16: such an answer is infinity, and no error is raised."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from export.plan.sharding import Sharding
from export.rows.table_error import TableError
from serving.bundle.manifest import Manifest
from serving.bundle.tables import OutputDtype, Pooling

_LARGEST = float(np.finfo(np.float16).max)
# How many times longer a bag may be than the average that was declared.
_LONGER = 100


def overflow_notes(manifest: Manifest, errors: Mapping[str, TableError], sharding: Sharding) -> Iterator[str]:
    """A line for each table whose answers may be infinity in FP16.

    A mean is at most as large as the largest element. A sum is at most the largest element times the ids of a bag.
    Bags are taken to have up to 100 times the declared pooling factor. Weights of ids are taken to be 1.

    Args:
        manifest: features, tables and output dtype.
        errors: of some tables; they hold the largest element of each.
        sharding: it holds the declared pooling factors.
    """
    if manifest.output_dtype is not OutputDtype.FP16:
        return
    for table in manifest.tables:
        if table.name not in errors:
            continue
        largest = errors[table.name].largest
        readers = sum(feature.table == table.name for feature in manifest.features)
        factor = max(sharding.pooling_factors_of(table.name, readers), default=1.0)
        longest = 1 if table.pooling is Pooling.MEAN else math.ceil(_LONGER * factor)
        if largest * longest > _LARGEST:
            ids = max(1, math.ceil(_LARGEST / largest))
            yield (
                f"table {table.name!r}: FP16 answers can be infinity: its largest element is {largest:.3g}, and "
                f"{ids:,} of it are beyond {_LARGEST:,.0f}: export with --output-dtype fp32"
            )
