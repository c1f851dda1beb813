"""Print bundles, plans and verifications on a terminal of 80 columns."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.padding import Padding
from rich.table import Table

from export.plan.report import PlanReport, Transfer
from export.values import error_text, size_text
from serving.bundle.id_maps import IdMap
from serving.bundle.lineage import delta_path, deltas_folder, steps_in
from serving.bundle.load import Bundle, versions
from serving.bundle.manifest import Agreement, Manifest, Parity
from serving.bundle.plan import ROUTER
from serving.bundle.release import release_path
from serving.bundle.scores import DenseInput, DensePart, InputDtype, LabelledAuc, ScoreOutput
from serving.model.config_file import read_config, settings_of
from serving.model.settings import ServingSettings
from serving.tables.memory_need import MemoryNeed, shared_bytes_of
from serving.tables.pages import cached
from serving.terminal.app import out

if TYPE_CHECKING:
    from export.parity.verify import Verification

_MARKS = {
    "·w": "ids carry weights",
    "·p": "ids are weighted by their position in the bag",
    "·m": "any int64 is an id; a map of this many known ids gives the row",
    "·h": "as ·m, for ids below the module's input_hash_size, rounded up to a multiple of its buckets",
}


def show_tables(manifest: Manifest) -> None:
    """Print each table: its features, shape, pooling, dtype, id policy, and its bytes before and after."""
    table = _table("tables", "table", "features", right=("shape", "pooling", "dtype", "bad ids", "float", "stored"))
    table.columns[1].no_wrap = False
    table.columns[1].overflow = "fold"
    table.columns[1].min_width = 12
    marks = _weighted_marks(manifest)
    for spec in manifest.tables:
        features = ", ".join(feature.name for feature in manifest.features if feature.table == spec.name)
        table.add_row(
            spec.name,
            features,
            f"{spec.rows:,} × {spec.dim}",
            spec.pooling.value + marks[spec.name],
            spec.dtype.value,
            spec.id_policy.value if spec.id_map is None else f"{spec.id_map.known:,} known{_map_mark(spec.id_map)}",
            size_text(4 * spec.rows * spec.dim),
            size_text(spec.rows * spec.row_bytes),
        )
    shown_marks = [*marks.values(), *(_map_mark(spec.id_map) for spec in manifest.tables if spec.id_map is not None)]
    table.caption = "; ".join(f"{mark}: {meaning}" for mark, meaning in _MARKS.items() if mark in shown_marks) or None
    out.print(table)


def _map_mark(id_map: IdMap) -> str:
    return "·m" if id_map.valid_ids is None else "·h"


def _weighted_marks(manifest: Manifest) -> dict[str, str]:
    """Return the mark of each table by name; "" if its ids are not weighted."""
    by_position = {feature.table for feature in manifest.features if feature.position_weights is not None}
    return {table.name: ("·p" if table.name in by_position else "·w") * table.weighted for table in manifest.tables}


def show_placement(report: PlanReport) -> None:
    """Print how each table is sharded, and on which ranks its shards are."""
    where = "where" if report.transfers else "ranks"
    table = _table("placement", "table", right=("shape", "dtype", "type", "shards", "largest", where))
    for name, placed in report.tables.items():
        table.add_row(
            name,
            f"{placed.rows:,} × {placed.dim}",
            placed.dtype.value,
            placed.sharding_type.value,
            str(len(placed.shards)),
            size_text(max(shard.bytes for shard in placed.shards)),
            _where(report, {shard.rank for shard in placed.shards}),
        )
    out.print(table)


def show_published(path: Path, manifest: Manifest) -> None:
    """Print the path of a published bundle and the next command to run.

    Args:
        path: <repository>/<model>/<version>.
        manifest: of the bundle.
    """
    out.print(f"published {path}", soft_wrap=True)
    model = path.parent
    if not manifest.hosts:
        command = f"tbe-serve run {model.parent}"
        if os.path.lexists(release_path(model)):
            command = f"tbe-export release {model} {path.name}"
        elif len(versions(model)) > 1:  # a running server serves an older version
            command = f"tbe-serve load {model.name}"
        out.print(f"next: {command}", soft_wrap=True)
        return
    models = ", ".join(host.model for host in manifest.hosts)
    addresses = settings_of(read_config(model)).hosts or {}
    if unknown := [host.host for host in manifest.hosts if str(host.host) not in addresses]:
        options = " ".join(f"--host {host}=ADDRESS" for host in unknown)
        out.print(f"next: serve {models}; then tbe-serve configure {model} {options}", soft_wrap=True)
    else:
        version = path.name
        out.print(
            f"next: serve version {version} of {models}; then version {version} of {model.name}", soft_wrap=True
        )


def show_hosts(manifest: Manifest) -> None:
    """Print the router that a host's bundle belongs to, or the hosts of a router's bundle."""
    if (part := manifest.part_of) is not None:
        out.print(f"host {part.host} of {part.model!r}: its tables are shards, its features are sums for a router")
    if manifest.hosts:
        table = _table("hosts", "host", "model", right=("version", "manifest"))
        for host in manifest.hosts:
            table.add_row(str(host.host), host.model, str(host.version), host.manifest[:12])
        out.print(table)


def show_ranks(report: PlanReport, *, traffic: bool) -> None:
    """Print the shards and bytes of each rank; if `traffic`, also the bytes that a request sends to and from it."""
    first, unit = (("where",), "hosts") if report.transfers else (("rank", "host"), "ranks")
    columns = (*first, "shards", "bytes", "share", *(("ids in", "sums out") if traffic else ()))
    title = f"{unit}, and the bytes that a request of {report.batch_size:,} samples moves" if traffic else unit
    table = _table(title, right=columns)
    for name, rank in zip(report.names, report.ranks, strict=True):
        moved = (size_text(rank.bytes_in), size_text(rank.bytes_out)) if traffic else ()
        names = (name,) if report.transfers else (name, str(rank.host))
        table.add_row(*names, str(rank.shards), size_text(rank.bytes), f"{rank.share:.1%}", *moved)
    out.print(table)


def show_memory(manifest: Manifest, report: PlanReport) -> None:
    """Print the memory that the largest server of a plan needs, by its parts: see `MemoryNeed`."""
    settings = ServingSettings()
    by_server = Counter[int]()
    for rank in report.ranks:
        by_server[rank.host] += rank.bytes
    need = MemoryNeed(
        weights_bytes=max(by_server.values()),
        instances=settings.instances,
        shared_bytes=shared_bytes_of(manifest, settings),
    )
    table = _table("memory of the largest server", "when", right=("tables", "processes", "shared", "total"))
    tables, processes, shared = need.weights_bytes, need.processes_bytes, need.shared_bytes * need.instances
    for when, *parts, total in (
        ("always", tables, processes, 0, need.request_bytes),
        ("while certificates are renewed", tables, 2 * processes, 2 * shared, need.limit_bytes),
        ("while two versions are loaded", 2 * tables, None, None, need.switching_bytes(tables)),
    ):
        table.add_row(when, *("" if part is None else size_text(part) for part in parts), size_text(total))
    out.print(table)


def show_transfers(report: PlanReport) -> None:
    """Print the bytes that a request moves between router and hosts, a line for each table that is on hosts."""
    title = f"between router and hosts, for a request of {report.batch_size:,} samples"
    table = _table(title, "table", "hosts", "sums", right=("router → hosts", "hosts → router"))
    by_table: dict[str, list[Transfer]] = {name: [] for name in report.tables}
    for transfer in report.transfers:
        by_table[transfer.table].append(transfer)
    for name, transfers in by_table.items():
        if transfers:
            hosts = _ranges({transfer.host for transfer in transfers})
            table.add_row(name, hosts, transfers[0].pattern, *_transferred(transfers))
    if in_router := sum(not transfers for transfers in by_table.values()):
        table.add_row(f"{in_router} in the router", "–", "–", "nothing", "nothing")
    table.add_section()
    table.add_row("all", "", "", *_transferred(report.transfers))
    out.print(table)


def _transferred(transfers: Sequence[Transfer]) -> tuple[str, str]:
    """The bytes to hosts and to the router, as text."""
    to_hosts = sum(transfer.to_host_bytes for transfer in transfers)
    to_router = sum(transfer.to_router_bytes for transfer in transfers)
    return size_text(to_hosts), size_text(to_router)


def show_parity(parity: Iterable[Parity]) -> None:
    """Print the largest error of an element at each step, a line for each table."""
    table = _table(
        "largest error of an element of a row, at each step from the float table",
        "table",
        right=("quantized", "limit", "cosine", "sharded", "scripted", "reloaded", "trained"),
    )
    for of_table in parity:
        table.add_row(
            of_table.table,
            error_text(of_table.quantized.largest),
            error_text(of_table.limit),
            f"{of_table.quantized.cosine:.6f}",
            *(
                error_text(step.largest) if step else "–"
                for step in (of_table.sharded, of_table.scripted, of_table.reloaded)
            ),
            error_text(of_table.trained.largest) if of_table.trained else "–",
        )
    out.print(table)
    _explain(
        "quantized: stored rows compared with float rows",
        "limit: the largest allowed quantized error: --max-error, or the rounding error of the dtype",
        "cosine: similarity of all stored rows and all float rows; 1 is the same direction",
        "sharded, scripted, reloaded: answers compared with the step before; 0 except for rounding",
        "scripted: – if the bundle has no program.pt",
        "trained: answers compared with the trained module's; – if it was not run",
        "answers are to one fixed request; their errors are divided by the number of ids in a bag",
    )


def show_scores(manifest: Manifest, part: DensePart | None) -> None:
    """Print the error of each output of a dense part, and its inputs; nothing if the bundle has no dense part.

    Args:
        manifest: of the bundle.
        part: its dense part, with the parity to print.
    """
    if part is None:
        return
    right = ("shape", "largest |score|", "compiled", "merged", "trained", "mean trained")
    table = _table("largest error of a score", "output", right=right)
    for output in part.outputs:
        parity = output.parity
        table.add_row(
            output.name,
            _typed(output),
            f"{parity.scale:.3g}",
            error_text(parity.scripted),
            error_text(parity.merged),
            "–" if parity.trained is None else error_text(parity.trained),
            "–" if parity.trained_mean is None else error_text(parity.trained_mean),
        )
    out.print(table)
    _explain(
        "largest |score|: in the answer to one fixed request",
        "compiled: scores compared with those of the layers before compilation",
        "merged: scores of merged requests compared with those of each request alone",
        "trained, mean trained: scores compared with the trained model's; – if it was not run",
    )
    _show_auc({output.name: output.parity.auc for output in part.outputs if output.parity.auc is not None})
    inputs = ", ".join(
        [
            "embeddings",
            *(f"{dense.name} {_typed(dense)}" for dense in part.inputs),
            *(
                f"{jagged.kind.value.lower()} of {jagged.name}"
                for jagged in part.jagged
                if jagged.name not in part.by_id
            ),
        ]
    )
    fastest, *slower = part.files_by_speed
    size = size_text(manifest.files[fastest.name].size_bytes)
    out.print(f"{fastest.name}: {size}, {part.dtype.value} weights, takes {inputs}", soft_wrap=True, markup=False)
    for file in slower:
        size = size_text(manifest.files[file.name].size_bytes)
        time = "" if file.relative_time is None else f", {file.relative_time:.2f} times its time"
        out.print(f"{file.name}: {size}, answers as {fastest.name}{time}", soft_wrap=True, markup=False)
    native = [f"{file.name}: for {file.instructions} and torch {file.torch}" for file in part.files if file.torch]
    for line in (*native, *(() if part.user_side is None else part.user_side.lines)):
        out.print(line, soft_wrap=True, markup=False)
    rules = [f"exactly {length} ids of {key}" for key, length in part.fixed_lengths.items()]
    rules += [f"as many ids of {', '.join(keys)} as of {first}" for first, *keys in part.together]
    for rule in rules:
        out.print(f"scores need {rule} in each sample", soft_wrap=True, markup=False)
    if part.mixes_samples:
        why = part.mixed_by or "the scores of a sample depend on the other samples of its request"
        out.print(f"requests are scored one by one: samples may meet in {why}", soft_wrap=True, markup=False)


def show_remarks(source: Manifest | PlanReport) -> None:
    """Print what a bundle leaves out, and the notes of a bundle or a plan, a line each."""
    if isinstance(source, Manifest) and source.left_out:
        out.print(f"left out: {', '.join(source.left_out)}", soft_wrap=True)
    for note in source.notes:
        out.print(f"note: {note}", soft_wrap=True)


def show_cached(bundle: Path, manifest: Manifest) -> None:
    """Print how much of the weights is in the page cache; nothing if the kernel does not say."""
    sizes = [size for name in manifest.weights_files if (size := cached(bundle / name)) is not None]
    if sizes and len(sizes) == len(manifest.weights_files):
        total, huge = (size_text(sum(numbers)) for numbers in zip(*sizes, strict=True))
        out.print(f"in the page cache: {total} of the weights, {huge} of it in huge pages")


def show_deltas(bundle: Bundle) -> None:
    """Print which deltas are part of a bundle, and the later ones beside the repository, if any."""
    model, manifest = bundle.path.absolute().parent, bundle.manifest
    folder = deltas_folder(model.parent) / model.name / bundle.lineage
    if manifest.compacted is not None:
        out.print(f"compacted: deltas up to {manifest.sequence} of lineage {folder.name} are part of it")
    if steps := [step for step in steps_in(folder) if step.sequence > manifest.sequence]:
        size = size_text(sum(delta_path(folder, *step).stat().st_size for step in steps))
        out.print(f"deltas: {len(steps)}, up to {steps[-1].sequence}, {size}, in {folder}", soft_wrap=True)


def show_verification(verification: "Verification") -> None:
    """Print the error of every table at every step."""
    title = "error of an element of a row"
    table = _table(title, "table", "step", right=("largest", "mean", "cosine", "worst row"))
    for parity in verification.parity:
        steps: dict[str, Agreement | None] = {
            "float ↔ quantized": parity.quantized,
            "quantized ↔ sharded": parity.sharded,
            "sharded ↔ scripted": parity.scripted,
            f"{'scripted' if parity.scripted else 'sharded'} ↔ reloaded": parity.reloaded,
            "trained ↔ reloaded": parity.trained,
        }
        for name, step in steps.items():
            if step is None:
                continue
            # All steps but the first compare answers to a probe, in which a "row" is a sample.
            worst = f"{step.worst_row:,}" if step.largest else "–"
            worst += "" if step is parity.quantized or worst == "–" else " (probe)"
            table.add_row(
                parity.table, name, error_text(step.largest), error_text(step.mean), f"{step.cosine:.8f}", worst
            )
        table.add_section()
    out.print(table)
    _explain(
        "quantized: stored rows; sharded: the program, compared with numpy's sums; scripted: compiled",
        "reloaded: the published files, in another process; trained: the trained module itself",
        "(probe): a sample of one fixed request; its errors are divided by the number of ids in a bag",
    )


def _explain(*lines: str) -> None:
    """Print the meaning of a table's columns below it."""
    for line in lines:
        out.print(Padding(line, (0, 0, 0, 2), expand=False))


def _typed(tensor: DenseInput | ScoreOutput) -> str:
    """Write the shape, such as "[B, 64]", after the dtype unless it is FP32."""
    rows = "B" if tensor.key is None else f"ids of {tensor.key}"
    shape = f"[{', '.join((rows, *map(str, tensor.shape)))}]"
    return shape if tensor.dtype.value == InputDtype.FP32.value else f"{tensor.dtype.value} {shape}"


def _show_auc(measured: Mapping[str, LabelledAuc]) -> None:
    """Print the AUC of outputs, if it was measured."""
    if not measured:
        return
    table = _table("AUC on labelled samples", "output", right=("served", "trained", "samples"))
    for name, auc in measured.items():
        trained = "–" if auc.trained is None else f"{auc.trained:.5f}"
        table.add_row(name, f"{auc.served:.5f}", trained, f"{auc.samples:,}")
    out.print(table)
    _explain("served: the bundle's scores; trained: the trained model's scores; – if it was not run")


def _where(report: PlanReport, ranks: set[int]) -> str:
    """Name the ranks that have a table's shards."""
    if not report.transfers:
        return _ranges(ranks)
    hosts = {report.ranks[rank].host for rank in ranks} - {ROUTER}
    named = [f"host{'s' * (len(hosts) > 1)} {_ranges(hosts)}"] if hosts else []
    return ", ".join([*(["router"] if len(hosts) < len(ranks) else []), *named])


def _ranges(numbers: set[int]) -> str:
    """Write {0, 1, 2, 5} as "0–2, 5"."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ranges)


def _table(title: str, *left: str, right: tuple[str, ...]) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
