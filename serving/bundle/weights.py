"""Where the bytes of a rank lie."""

from pathlib import Path

from serving.bundle.hosts import FIRST_WEIGHTS, path_of
from serving.bundle.manifest import Manifest


def weights_path(directory: Path, manifest: Manifest, rank: int) -> Path:
    """The file with the bytes of a rank. It may not be there: a host's bundle may be on that host alone.

    Args:
        directory: of the bundle.
        manifest: of the bundle.
        rank: number of the rank.

    Returns:
        The bundle's own file; of a rank on another host, that of the host's bundle in the same repository.
    """
    found = manifest.plan.ranks[rank]
    if found.weights_file is not None:
        return directory / found.weights_file
    host = next(each for each in manifest.hosts if each.host == found.host)
    return path_of(directory, host) / FIRST_WEIGHTS


def weights_paths(directory: Path, manifest: Manifest) -> dict[int, Path]:
    """`weights_path` of every rank, by its number."""
    return {rank: weights_path(directory, manifest, rank) for rank in range(len(manifest.plan.ranks))}
