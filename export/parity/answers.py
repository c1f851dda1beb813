"""The answers to one probe, at each step from the stored rows to a served model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from export.parity.probe import as_arguments, make_probe, run_program, run_reloaded
from export.program.compile import build_program
from export.rows.tally import Tally, finite
from serving.bundle.manifest import Agreement, Manifest, Parity
from serving.bundle.tables import Table
from serving.ranks.weights import map_weights
from serving.reference import Pooled, pool
from serving.request.id_maps import IdMaps, known_of_keys
from serving.request.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Answers:
    """A probe, and the answers to it. All but `pooled` are float32 or float16 [B, D].

    Attributes:
        probe: the request.
        pooled: by numpy, from the stored rows.
        sharded: by the program before it is compiled.
        scripted: by TorchScript.
        reloaded: by another process, from the files.
    """

    probe: Tensors
    pooled: Pooled
    sharded: npt.NDArray[Any]
    scripted: npt.NDArray[Any]
    reloaded: npt.NDArray[Any]

    def refusals(self, manifest: Manifest) -> list[str]:
        """A line for each answer that differs from the one of the step before.

        `sharded` may differ from `pooled` as far as FP32 summation explains. The others must be equal.
        """
        tables = {feature.name: feature.table for feature in manifest.features}
        refusals = [
            f"table {tables[name]!r}: the program is off by {error:.3g} for feature {name!r}"
            for name, error in self.pooled.misses(self.sharded)
        ]
        for what, before, after in (
            ("the compiled program", self.sharded, self.scripted),
            ("a fresh process", self.scripted, self.reloaded),
        ):
            for table in manifest.tables:
                moved = np.subtract(*finite(columns_of(manifest, table, after), columns_of(manifest, table, before)))
                if moved.any():
                    largest = np.abs(moved).max()
                    refusals.append(f"table {table.name!r}: {what} answers differently, by {largest:.3g}")
        return refusals

    def parity(self, manifest: Manifest, table: Table, quantized: Agreement, limit: float) -> Parity:
        """How far the numbers of one table moved at each step.

        Args:
            manifest: features and tables.
            table: the table.
            quantized: its float rows compared with its stored ones.
            limit: the largest error that `quantized` may have.
        """

        def step(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> Agreement:
            tally = Tally()
            tally.add(0, *finite(columns_of(manifest, table, before), columns_of(manifest, table, after)))
            return tally.agreement

        return Parity(
            table=table.name,
            limit=limit,
            quantized=quantized,
            # Where a sum may leave the range of its dtype, it is compared with itself.
            sharded=step(np.where(np.isinf(self.pooled.bound), self.sharded, self.pooled.answer), self.sharded),
            scripted=step(self.sharded, self.scripted),
            reloaded=step(self.scripted, self.reloaded),
        )


def answer_probe(directory: Path, manifest: Manifest, program: nn.Module) -> Answers:
    """Answer a probe at each step.

    Args:
        directory: of the bundle, published or not. It has a manifest.
        manifest: of the bundle.
        program: the compiled program.

    Raises:
        ParityError: a fresh process cannot answer from the directory.
    """
    maps = IdMaps.of(directory, manifest)
    probe = make_probe(manifest, known_of_keys({} if maps is None else maps.known, manifest))
    arguments = as_arguments(manifest, probe, maps)
    built = build_program(manifest)
    for each in (built, program):
        each.weights_host = map_weights(directory, manifest.plan)  # type: ignore[assignment]
    return Answers(
        probe=probe,
        pooled=pool(directory, manifest, probe),
        sharded=run_program(built, arguments),
        scripted=run_program(program, arguments),
        reloaded=run_reloaded(directory, probe),
    )


def columns_of(manifest: Manifest, table: Table, answer: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The columns of all features that read a table: [B, D] → float64 [B, columns]."""
    of_feature = [feature.table == table.name for feature in manifest.features]
    dims = [each.dim for each in manifest.feature_tables]
    columns: npt.NDArray[np.float64] = answer[:, np.repeat(of_feature, dims)].astype(np.float64)
    return columns
