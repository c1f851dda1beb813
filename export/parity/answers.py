"""The answers to one probe, at each step from the stored rows to a served model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from export.parity.fresh_process import FreshProcess
from export.parity.probe import make_probe, run_program
from export.program.compile import build_program
from export.rows.tally import Tally, finite
from serving.bundle.manifest import Agreement, Manifest, Parity
from serving.bundle.tables import Table
from serving.ranks.weights import Weights
from serving.reference import Pooled, pool
from serving.request.id_maps import IdMaps, known_of_keys
from serving.request.tensors import Tensors

ByFeature = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Answers:
    """A probe, and the answers to it. All but `pooled` are by feature, float32 or float16 [B, dim] or [n, dim].

    Attributes:
        probe: the request.
        pooled: by numpy, from the stored rows.
        sharded: by the program before it is compiled.
        scripted: by TorchScript.
        reloaded: by another process, from the files.
    """

    probe: Tensors
    pooled: Pooled
    sharded: ByFeature
    scripted: ByFeature
    reloaded: ByFeature

    @property
    def embeddings(self) -> npt.NDArray[Any]:
        """`reloaded`, all features side by side: float32 or float16 [B, D]. None of them is a sequence."""
        return np.concatenate(list(self.reloaded.values()), axis=1)

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
                largest = max(np.abs(np.subtract(a, b)).max() for a, b in _pairs(manifest, table, after, before))
                if largest:
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

        def step(before: ByFeature, after: ByFeature) -> Agreement:
            tally = Tally()
            for a, b in _pairs(manifest, table, before, after):
                tally.add(0, a, b)
            return tally.agreement

        # Where a sum may leave the range of its dtype, it is compared with itself.
        exact = {
            name: np.where(np.isinf(bound), self.sharded[name], answer)
            for name, answer, bound in zip(self.pooled.features, self.pooled.answers, self.pooled.bounds, strict=True)
        }
        return Parity(
            table=table.name,
            limit=limit,
            quantized=quantized,
            sharded=step(exact, self.sharded),
            scripted=step(self.sharded, self.scripted),
            reloaded=step(self.scripted, self.reloaded),
        )


def answer_probe(directory: Path, manifest: Manifest, program: nn.Module, fresh: FreshProcess) -> Answers:
    """Answer a probe at each step.

    Args:
        directory: of the bundle, published or not. It has a manifest.
        manifest: of the bundle.
        program: the compiled program.
        fresh: another process.

    Raises:
        ParityError: a fresh process cannot answer from the directory.
    """
    maps = IdMaps.of(directory, manifest)
    probe = make_probe(manifest, known_of_keys({} if maps is None else maps.known, manifest))
    built = build_program(manifest)
    for each in (built, program):
        each.weights_host = Weights(directory, manifest).tensors  # type: ignore[assignment]
    pooled = pool(directory, manifest, probe)
    return Answers(
        probe=probe,
        pooled=pooled,
        sharded=pooled.by_feature(run_program(built, manifest, probe, maps)),
        scripted=pooled.by_feature(run_program(program, manifest, probe, maps)),
        reloaded=pooled.by_feature(fresh.outputs(directory, probe)),
    )


def _pairs(
    manifest: Manifest, table: Table, a: ByFeature, b: ByFeature
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Two answers of each feature that reads a table: float64, all finite where they differ."""
    for feature in manifest.features:
        if feature.table == table.name:
            yield finite(a[feature.name].astype(np.float64), b[feature.name].astype(np.float64))
