"""A small workload."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from benchmarks.peer_workload import PeerWorkload


@pytest.fixture(scope="module")
def ragged() -> "PeerWorkload":
    """Two tables, one of them read twice; bags with no ids, one, and all they can have."""
    from benchmarks.peer_workload import PeerWorkload

    random = np.random.default_rng(0)
    tops = np.array([50, 50, 50, 7, 7, 50])
    padded = random.integers(0, tops, (3, 5, 6))
    padded[:, 0, 2] = padded[:, 1, 3:5] = padded[:, 2, :3] = padded[:, 3, 1:3] = -1
    features = [(0, 3), (1, 2), (2, 1)]
    return PeerWorkload("ragged", [50, 7, 50], [16, 8, 16], features, {5: padded})
