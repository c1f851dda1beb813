"""Sums that leave FP16: said at export, since an answer is infinity then, without an error."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from export.parity import TableError
from export.sharding import Sharding
from serving.bundle import Manifest, OutputDtype, Pooling

_LARGEST = float(np.finfo(np.float16).max)
# Bags may be longer than the average that was declared.
_LONGER = 100


def overflow_notes(manifest: Manifest, errors: Mapping[str, TableError], sharding: Sharding) -> Iterator[str]:
    """A line for each table whose answers could be infinity in FP16.

    A mean is as large as a row can be. A sum is that times the ids of a bag: a hundred times the pooling factor that
    was declared, at most; weights of ids aside.
    """
    if manifest.output_dtype is not OutputDtype.FP16:
        return
    for table in manifest.tables:
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
