"""Every workload that others are measured on too."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks import peers_inprocess, peers_served
from benchmarks.measure import Result
from benchmarks.peer_servers import PEERS
from benchmarks.peer_workload import PeerWorkload, dlrm, movielens, wide

# In FP32 its tables are larger than this machine's memory.
_FP32_FITS_NOT = {name: peer for name, peer in PEERS.items() if peer.kind == "int8"}


_LARGE_ROUNDS = 6


def run_quick(folder: Path) -> Iterator[Result]:
    """One workload, one round."""
    yield from _workload(dlrm(1_000_000, "dlrm_1m"), folder, rounds=1)


def run(folder: Path) -> Iterator[Result]:
    """MLPerf's DLRM-v2 capped at a million rows and at ten, a wide model, MovieLens."""
    for workload in (dlrm(1_000_000, "dlrm_1m"), wide(), movielens()):
        yield from _workload(workload, folder)
    large = dlrm(10_000_000, "dlrm_10m")
    yield Result("dlrm_10m_float", large.float_bytes, unit="B")
    large.export(folder / "dlrm_10m" / "repository")
    large.write(folder / "dlrm_10m" / "rows", ["int8"])
    # There are few others, and what is read from memory differs more from round to round.
    yield from peers_served.run(large, folder / "dlrm_10m", _FP32_FITS_NOT, _LARGE_ROUNDS)
    shutil.rmtree(folder / "dlrm_10m")


def _workload(workload: PeerWorkload, folder: Path, rounds: int = peers_served.ROUNDS) -> Iterator[Result]:
    parent = folder / workload.name
    bundle = workload.export(parent / "repository")
    workload.write(parent / "rows", ["fp32", "int8"])
    yield from peers_inprocess.run(workload, bundle, parent / "rows")
    yield from peers_served.run(workload, parent, PEERS, rounds)
    shutil.rmtree(parent)
