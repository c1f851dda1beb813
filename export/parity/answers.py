"""Answer one probe at each step from the stored rows to a served model."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from export.parity.fresh_process import FreshProcess
from export.program.compile import write_program
from export.rows.table_error import Tally, finite
from export.scores.probe_inputs import ByFeature
from export.trained.probe_request import make_probe
from serving.bundle.id_maps import ID_MAPS_FILE
from serving.bundle.load import Bundle, weights_path, weights_paths
from serving.bundle.manifest import Agreement, Manifest, Parity, write_manifest
from serving.bundle.plan import FIRST_WEIGHTS
from serving.bundle.tables import Pooling, Table
from serving.bundle.tensor_names import EMBEDDINGS, SEQUENCES
from serving.engine import answer
from serving.lookup.batch_answer import BatchAnswer, program_arguments
from serving.lookup.build_program import build_program
from serving.reference import Pooled, pool
from serving.requests.accept import accept
from serving.requests.answers import decode_rows
from serving.requests.batches import Batch
from serving.requests.id_maps import IdMaps, known_of_keys
from serving.requests.schema import schema_of
from serving.requests.types import Outputs, Tensors
from serving.requests.validate import validate
from serving.tables.table_files import TableFiles

Arguments = tuple[Tensor, Tensor, Tensor | None]


def as_arguments(manifest: Manifest, request: Tensors, maps: IdMaps | None) -> Arguments:
    """Convert a request for all keys of pooled features to the arguments of a program.

    Args:
        manifest: of the bundle.
        request: the request.
        maps: of the bundle's ids.

    Returns:
        values int64 [N], offsets int64 [F·B + 1], weights float32 [N] or None.
    """
    checked = validate([accept(schema_of(manifest, maps), request)])
    weights = None if checked.weights is None else torch.from_numpy(checked.weights)
    return torch.from_numpy(checked.values), torch.from_numpy(checked.offsets), weights


def run_program(program: nn.Module, manifest: Manifest, probe: Tensors, maps: IdMaps | None) -> Outputs:
    """Answer a probe by the program of a bundle, compiled or not."""
    schema = schema_of(manifest, maps)

    def look_up(batches: Sequence[Batch]) -> list[BatchAnswer]:
        return [BatchAnswer(program(*program_arguments(batch)).numpy()) for batch in batches]

    (outputs,) = answer(schema, [accept(schema, probe)], look_up).outputs()
    return outputs


@dataclass(frozen=True, slots=True)
class Answers:
    """A probe, and the answers to it. All but `pooled` are by feature, float32 or float16 [B, dim] or [n, dim].

    Attributes:
        probe: the request.
        pooled: by numpy, from the stored rows.
        sharded: by the program before it is compiled.
        scripted: by TorchScript. None: the bundle has no `program.pt`, or torch cannot load it.
        reloaded: by another process, from the files.
        requested: to the request for scores, by another process, from the files. Empty: the bundle has no scores.
    """

    probe: Tensors
    pooled: Pooled
    sharded: ByFeature
    scripted: ByFeature | None
    reloaded: ByFeature
    requested: ByFeature

    def refusals(self, manifest: Manifest) -> list[str]:
        """A line for each answer that differs from that of the step before.

        `sharded` may differ from `pooled` by what FP32 summation explains. The other steps must agree exactly.
        """
        tables = {feature.name: feature.table for feature in manifest.features}
        refusals = [
            f"table {tables[name]!r}: the program is off by {error:.3g} for feature {name!r}"
            for name, error in self.pooled.misses(self.sharded)
        ]
        steps = [("a fresh process", self.scripted or self.sharded, self.reloaded)]
        if self.scripted is not None:
            steps.insert(0, ("the compiled program", self.sharded, self.scripted))
        for step, before, after in steps:
            for table in manifest.tables:
                features = [name for name, of_feature in tables.items() if of_feature == table.name]
                pairs = (_doubles(after[name], before[name]) for name in features)
                largest = max(np.abs(np.subtract(a, b)).max() for a, b in pairs)
                if largest:
                    refusals.append(f"table {table.name!r}: {step} answers differently, by {largest:.3g}")
        return refusals

    def parity(self, manifest: Manifest, table: Table, quantized: Agreement, limit: float) -> Parity:
        """The errors of one table at each step, as errors of an element of one row.

        Args:
            manifest: features and tables.
            table: the table.
            quantized: its float rows compared with its stored rows.
            limit: the largest allowed error of `quantized`.
        """
        ids = ids_in_bags(manifest, self.probe)

        def step(before: ByFeature, after: ByFeature) -> Agreement:
            tally = Tally()
            for feature in manifest.features:
                if feature.table == table.name:
                    tally.add(0, *by_id(ids[feature.name], before[feature.name], after[feature.name]))
            return tally.agreement

        # A sum that may leave the range of its dtype is compared with itself.
        exact = {
            name: np.where(np.isinf(bound), self.sharded[name], answer)
            for name, answer, bound in zip(self.pooled.features, self.pooled.answers, self.pooled.bounds, strict=True)
        }
        return Parity(
            table=table.name,
            limit=limit,
            quantized=quantized,
            sharded=step(exact, self.sharded),
            scripted=None if self.scripted is None else step(self.sharded, self.scripted),
            reloaded=step(self.scripted or self.sharded, self.reloaded),
        )


def answer_probe(
    directory: Path,
    manifest: Manifest,
    program: nn.Module | None,
    fresh: FreshProcess,
    request: Tensors | None,
) -> Answers:
    """Answer a probe at each step.

    Args:
        directory: of the bundle, published or not. It has a manifest.
        manifest: of the bundle.
        program: the compiled program, or None.
        fresh: another process.
        request: for scores; None: the bundle has no scores.

    Raises:
        ParityError: a fresh process cannot answer from the directory.
    """
    maps = IdMaps.of(directory, manifest)
    probe = make_probe(manifest, known_of_keys({} if maps is None else maps.known, manifest))
    pooled = pool(directory, manifest, probe)

    def run(module: nn.Module) -> ByFeature:
        module.weights_host = TableFiles(directory, manifest).tensors  # type: ignore[assignment]
        return pooled.by_feature(run_program(module, manifest, probe, maps))

    return Answers(
        probe=probe,
        pooled=pooled,
        sharded=run(build_program(manifest)),
        scripted=None if program is None else run(program),
        reloaded=pooled.by_feature(fresh.outputs(directory, probe)),
        requested={} if request is None else by_feature(manifest, request, fresh.outputs(directory, request)),
    )


def by_feature(manifest: Manifest, request: Tensors, outputs: Outputs) -> ByFeature:
    """Split the outputs of a request for all keys by feature: [B, dim] if it is pooled, otherwise [n, dim]."""
    lengths = request.lengths.reshape(len(manifest.keys), -1).sum(axis=1)
    ids = dict(zip(manifest.keys, lengths.tolist(), strict=True))
    shapes = {
        feature.name: (ids[feature.key], table.dim)
        for feature, table in zip(manifest.features, manifest.feature_tables, strict=True)
        if table.is_sequence
    }
    arrays = decode_rows(outputs[SEQUENCES], shapes) if shapes else {}
    for name, (first, last) in manifest.pooled_columns.items():
        arrays[name] = outputs[EMBEDDINGS][:, first:last]
    return {feature.name: arrays[feature.name] for feature in manifest.features}


def assembled_manifest(router: Manifest) -> Manifest:
    """The manifest of a router's tables, features and plan in one bundle, with a weights file for every rank."""
    ranks = tuple(
        msgspec.structs.replace(rank, weights_file=f"weights.{number}.bin")
        for number, rank in enumerate(router.plan.ranks)
    )
    return msgspec.structs.replace(
        router,
        plan=msgspec.structs.replace(router.plan, ranks=ranks),
        hosts=(),
        compacted=None,
        dense_part=None,
        files={},
        parity=(),
    )


def answer_assembled(
    directory: Path,
    router: Manifest,
    program: "torch.jit.ScriptModule | None",
    parts: Mapping[int, Bundle],
    fresh: FreshProcess,
    request: Tensors | None,
) -> Answers:
    """Answer a probe with all ranks of a router's plan in one process.

    Args:
        directory: of the router's bundle, published or not. It need not have a manifest.
        router: its manifest, with the digests of its files.
        program: its compiled program, or None.
        parts: the bundle of each rank that is on another host.
        fresh: another process.
        request: for scores; None: the bundle has no scores.

    Raises:
        ParityError: a fresh process cannot answer.
    """
    whole = assembled_manifest(router)
    router_weights = weights_path(directory, router, 0)
    files = {0: (router_weights, router.files[router_weights.name])}
    files |= {rank: (part.path / FIRST_WEIGHTS, part.manifest.files[FIRST_WEIGHTS]) for rank, part in parts.items()}
    with tempfile.TemporaryDirectory() as folder, _as_compiled_for(program, whole):
        digests = {}
        for rank, link in weights_paths(Path(folder), whole).items():
            file, digests[link.name] = files[rank]
            link.symlink_to(file.absolute())
        if ID_MAPS_FILE in whole.mapped_files:
            (Path(folder) / ID_MAPS_FILE).symlink_to((directory / ID_MAPS_FILE).absolute())
            digests[ID_MAPS_FILE] = router.files[ID_MAPS_FILE]
        whole = write_program(Path(folder), whole, program, digests)
        write_manifest(Path(folder), whole)
        return answer_probe(Path(folder), whole, program, fresh, request)


@contextmanager
def _as_compiled_for(program: "torch.jit.ScriptModule | None", manifest: Manifest) -> Iterator[None]:
    """Inside the block, `program` has the digest of `manifest`, which differs from its own only in weights files."""
    if program is None:
        yield
        return
    digest = program.placement_digest
    program.placement_digest = manifest.placement_digest
    try:
        yield
    finally:
        program.placement_digest = digest


def by_id(
    ids: npt.NDArray[np.float64], before: npt.NDArray[Any], after: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Divide two answers of a feature by the ids of each bag, so that they differ by the error of one row's element.

    Args:
        ids: the ids in each bag, by `ids_in_bags`. A sum of weights below 1 counts as 1, so that no error grows.
        before, after: [B, dim] or [n, dim].
    """
    a, b = _doubles(before, after)
    divisor = np.maximum(ids, 1)
    return a / divisor, b / divisor


def ids_in_bags(manifest: Manifest, probe: Tensors) -> dict[str, npt.NDArray[np.float64]]:
    """The number of rows that each answer adds up, or the sum of their |weights|: by feature, float64 [B, 1].

    It is [[1]] for features with mean pooling, or without pooling.
    """
    bags = probe.lengths.reshape(len(manifest.keys), -1)
    weights = np.ones(probe.values.size) if probe.weights is None else np.abs(probe.weights.astype(np.float64))
    sums = np.concatenate([[0], np.cumsum(weights)])[np.concatenate([[0], np.cumsum(bags)])]
    by_bag = np.diff(sums).reshape(bags.shape)
    tables = {table.name: table for table in manifest.tables}
    counts = {}
    for lengths, sent, features in zip(bags, by_bag, manifest.keys.values(), strict=True):
        for feature in features:
            count = sent
            if tables[feature.table].pooling is not Pooling.SUM:
                count = np.ones(1)
            elif feature.position_weights is not None:
                by_position = np.abs(feature.position_weights or np.ones(lengths.max(initial=0)))
                count = np.concatenate([[0.0], np.cumsum(by_position)])[lengths]
            counts[feature.name] = count[:, np.newaxis]
    return counts


def _doubles(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Convert two answers to float64, with finite numbers wherever they differ."""
    return finite(a.astype(np.float64), b.astype(np.float64))
