"""What a lookup costs as its size grows, one thing at a time; and what a served model costs in memory."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from benchmarks.measure import Result, interleave, p50
from benchmarks.model_memory import in_memory, private_bytes, settle
from export import ExportConfig, export_model
from export.trained.generated_checkpoint import generated_checkpoint
from export.trained.tables import collect_tables
from serving.bench.requests import Distribution, random_requests
from serving.model.settings import ServingSettings
from serving.server import Ports, run_server

DIM = 32
SAMPLES = (1, 4, 16, 64, 256, 1024)
IDS = (1, 10, 100, 1000)
TABLES = (1, 4, 16, 64, 256)
ROWS = (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)
INSTANCES = (1, 2, 4)
ROUNDS = 60


def run(folder: Path) -> Iterator[Result]:
    """One curve after another; what is not varied is 16 samples, 10 ids a bag, 16 tables of 10,000 rows."""
    torch.set_num_threads(1)
    bundles = {tables: _export(folder / f"t{tables}", [10_000] * tables) for tables in TABLES}
    yield from _curve("samples", {samples: (bundles[16], samples, 10) for samples in SAMPLES})
    yield from _curve("ids_a_bag", {ids: (bundles[16], 16, ids) for ids in IDS})
    yield from _curve("tables", {tables: (bundle, 16, 10) for tables, bundle in bundles.items()})
    # As many lookups in one table as in sixteen.
    sizes = {rows: _export(folder / f"r{rows}", [rows]) for rows in ROWS}
    yield from _curve("rows", {rows: (bundle, 256, 10) for rows, bundle in sizes.items()})
    yield from _memory(sizes)


def _curve(name: str, points: dict[int, tuple[Path, int, int]]) -> Iterator[Result]:
    """Medians of points that were called in turn."""
    candidates = {}
    for value, (bundle, samples, ids) in points.items():
        engine = in_memory(bundle)
        factors = dict.fromkeys((feature.name for feature in engine.bundle.manifest.features), float(ids))
        requests = cycle(random_requests(engine.bundle.manifest, samples, Distribution(), factors))
        candidates[str(value)] = lambda engine=engine, requests=requests: engine.outputs(next(requests))
    for point, seconds in interleave(candidates, ROUNDS).items():
        yield Result(f"curve_{name}_{point}_p50_s", p50(seconds))


def _memory(sizes: dict[int, Path]) -> Iterator[Result]:
    """Memory that the processes of a served model have to themselves, by its size and its instances."""
    for rows, bundle in sizes.items():
        yield Result(f"curve_memory_rows_{rows}", _private_bytes(bundle), unit="B")
        yield Result(f"curve_memory_rows_{rows}_bundle", (bundle / "weights.0.bin").stat().st_size, unit="B")
    largest = list(sizes.values())[-1]
    for instances in INSTANCES:
        again = largest.parent.parent.parent / f"i{instances}"
        bundle = _export(again, [10_000], ServingSettings(instances=instances))
        yield Result(f"curve_memory_instances_{instances}", _private_bytes(bundle), unit="B")


def _private_bytes(bundle: Path) -> int:
    with run_server(
        bundle.parent.parent, Ports(grpc=0, http=0, operations=0), log=bundle.parent.parent / "log"
    ) as server:
        settle(server)
        return private_bytes(server)


def _export(folder: Path, rows: Sequence[int], serving: ServingSettings | None = None) -> Path:
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=f"t{n}", num_embeddings=row, embedding_dim=DIM, feature_names=[f"f{n}"])
            for n, row in enumerate(rows)
        ],
    )
    checkpoint = generated_checkpoint(collect_tables(module).tables)
    return export_model(module, folder / "repository", "m", ExportConfig(serving=serving), checkpoint=checkpoint)
