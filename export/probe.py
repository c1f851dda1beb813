"""One request that asks every table, and its answer: by a program here, by a fresh process."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from export.errors import ParityError
from serving.bundle import Manifest
from serving.kjt import Tensors

_SEED = 20_451
_SAMPLES = 64
_LONGEST_BAG = 100


def make_probe(manifest: Manifest) -> Tensors:
    """A seeded request with empty bags, a long bag, and the first and last row of every table."""
    random = np.random.default_rng(_SEED)
    tables = manifest.feature_tables
    lengths = random.integers(0, 9, (len(tables), _SAMPLES)).astype(np.int32)
    lengths[:, 0] = _LONGEST_BAG
    lengths[:, 1] = 0
    columns = []
    for table, bags in zip(tables, lengths, strict=True):
        ids = random.integers(0, table.rows, bags.sum())
        ids[:2] = 0, table.rows - 1
        columns.append(ids)
    values = np.concatenate(columns)
    weights = random.normal(size=values.size).astype(np.float32) if manifest.weighted else None
    if weights is not None:
        counted = np.repeat([table.weighted for table in tables], lengths.sum(axis=1))
        weights[~counted] = 1
    return Tensors(None, values, lengths.ravel(), weights)


def run_program(program: nn.Module, probe: Tensors) -> npt.NDArray[Any]:
    """A program's answer to `probe`, [B, D]; compiled or not."""
    offsets = np.concatenate([[0], np.cumsum(probe.lengths)])
    weights = None if probe.weights is None else torch.from_numpy(probe.weights)
    answer: npt.NDArray[Any] = program(
        torch.from_numpy(probe.values), torch.from_numpy(offsets), weights, None
    ).numpy()
    return answer


def run_reloaded(directory: Path, probe: Tensors) -> npt.NDArray[Any]:
    """The answer of a fresh process that opens the bundle at `directory` as serving does, [B, D].

    Raises:
        ParityError: it cannot open the bundle, or refuses the probe.
    """
    with tempfile.TemporaryDirectory() as folder:
        arrays: dict[str, npt.NDArray[Any]] = {"values": probe.values, "lengths": probe.lengths}
        if probe.weights is not None:
            arrays["weights"] = probe.weights
        np.savez(Path(folder) / "probe.npz", **arrays)
        command = [sys.executable, "-P", str(Path(__file__).with_name("reload.py")), str(directory), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ParityError(f"{directory}: a fresh process could not answer from it:\n{done.stderr.strip()}")
        answer: npt.NDArray[Any] = np.load(Path(folder) / "answer.npy", allow_pickle=False)
        return answer
