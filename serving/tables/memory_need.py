"""The memory that a server needs: the formula for Kubernetes manifests, plans and docs/sizing.md#memory."""

from dataclasses import dataclass
from math import ceil

from serving.bundle.manifest import Manifest
from serving.model.settings import ServingSettings
from serving.tables.memory_budget import MOST_OF_MEMORY, PROCESS_BYTES

# The maximum shared memory of an instance, unless `tbe-serve run --shm-mib` sets another one.
SHM_BYTES = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """The memory of a server, in bytes.

    Attributes:
        weights_bytes: the bytes of the weights files and id maps of all served versions, or of their copies; 0 if
            they are in huge pages, which do not count as memory.
        instances: the number of processes that answer requests.
        shared_bytes: the maximum shared memory of an instance, for the requests that it answers together.
    """

    weights_bytes: int
    instances: int
    shared_bytes: int = SHM_BYTES

    @property
    def processes_bytes(self) -> int:
        """Bytes of the instances, and of tritonserver with `tbe-serve run`, which count as one instance."""
        return (self.instances + 1) * PROCESS_BYTES

    @property
    def request_bytes(self) -> int:
        """The bytes that the server always needs: weights and processes."""
        return self.weights_bytes + self.processes_bytes

    @property
    def limit_bytes(self) -> int:
        """The maximum bytes: weights, shared memory, and all processes twice while certificates are renewed."""
        twice = 2 * (self.processes_bytes + self.instances * self.shared_bytes)
        return max(self.weights_bytes + twice, ceil(self.weights_bytes / MOST_OF_MEMORY))

    def switching_bytes(self, weights_bytes: int) -> int:
        """`limit_bytes` while a second version with `weights_bytes` is loaded beside the first."""
        return self.limit_bytes + weights_bytes + self.instances * (PROCESS_BYTES + self.shared_bytes)


def shared_bytes_of(manifest: Manifest, settings: ServingSettings) -> int:
    """The shared memory of an instance of a bundle, in bytes: enough for two of its largest requests, at most 1 GiB.

    A request takes 12 bytes for each id, 4 for each length, and twice the numbers of its answer. The size of
    sequences and dense inputs depends on the request, so a bundle with sequences or dense inputs gets 1 GiB.
    """
    if manifest.dense_part is not None or any(table.is_sequence for table in manifest.tables):
        return SHM_BYTES
    dims = {table.name: table.dim for table in manifest.tables}
    columns = sum(dims[feature.table] for feature in manifest.features)
    sample_bytes = 4 * len(manifest.features) + 2 * 4 * columns
    largest = 12 * settings.max_request_ids + sample_bytes * settings.max_request_samples
    return min(ceil(2 * largest / _MIB) * _MIB, SHM_BYTES)
