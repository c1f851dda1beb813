"""What a host is asked for a batch, as arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.request.tensors import Ids, Lengths, Weights

PartialSums = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class PartialRequest:
    """A request to a host. A segment is one feature over one shard.

    Attributes:
        rows: row numbers of the host's shards, segment-major; int64 [n].
        lengths: bag sizes, segment-major; int32 [segments · B].
        weights: a weight for each row; float32 [n]. None where the host takes none.
        segments: names of the segments asked for, joined by commas. None: all of the host's, in its order.
        samples: B.
        columns: columns of the answer, the sum of the segments' widths.
        part_of: what the bundle that answers has to be a part of, as `serving.bundle.hosts.Part.text`. None: it is
            known.
    """

    rows: Ids
    lengths: Lengths
    weights: Weights | None
    segments: str | None
    samples: int
    columns: int
    part_of: str | None = None
