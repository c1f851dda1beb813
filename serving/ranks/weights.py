"""The bytes of ranks, mapped from their files."""

import mmap
import warnings
from pathlib import Path

import torch

from serving.bundle.plan import Plan
from serving.errors import BundleError


def map_weights(directory: Path, plan: Plan) -> list[torch.Tensor]:
    """Map the weights file of each rank.

    Returns:
        For each rank, the bytes of its file: uint8 [size of the file], which nobody may write to. A page is read when
        it is first touched. Of a rank on another host, nothing: uint8 [0].

    Raises:
        BundleError: a file cannot be mapped.
    """
    return [
        torch.empty(0, dtype=torch.uint8) if rank.weights_file is None else _map(directory / rank.weights_file)
        for rank in plan.ranks
    ]


def _map(path: Path) -> torch.Tensor:
    if path.stat().st_size == 0:  # a rank without shards: an empty file cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be mapped: {error.strerror}: it takes address space, and memory only as it is read: "
            "look at `ulimit -v` and the limits of the container"
        ) from error
    with warnings.catch_warnings():
        # torch has no read-only tensors. The program only reads them.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)
