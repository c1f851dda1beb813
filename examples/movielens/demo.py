"""`make demo`: train, export, serve, look up and score, and show the results."""

import logging
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from torch import Tensor

from examples.movielens import data, train
from examples.movielens.model import FEATURES, Ranker, to_kjt
from export.__main__ import app as tbe_export
from serving.__main__ import app as tbe_serve
from serving.bundle.load import Bundle, open_bundle
from serving.client import LookupClient
from serving.server import Ports, Server, run_server

FOLDER = Path("build/demo")
REPOSITORY = FOLDER / "repository"
CHECKPOINT = FOLDER / "ranker.pt"
MODELS = {"movielens": "int8", "movielens_int4": "int4"}


@dataclass(frozen=True, slots=True)
class Served:
    """The test samples scored with one served model; times are of a call.

    Attributes:
        model: its name.
        what: what it answered, for people.
        auc: of all test samples.
        p50_ms: of calls.
        p99_ms: of calls.
        calls: how many.
    """

    model: str
    what: str
    auc: float
    p50_ms: float
    p99_ms: float
    calls: int


def main() -> None:
    """Run the demo in the folder build/demo, which is emptied first."""
    # torchrec checks for tracing on every forward pass, with a function that torch warns about.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)

    step(console, "1", "Train a TorchRec model on MovieLens-100k, on the earlier 80 % of the ratings")
    samples = data.read_samples()
    model = train.train(samples, console)
    train.save(model, CHECKPOINT)
    float_auc = train.test_auc(samples, lambda batch: model(to_kjt(batch)))
    console.print(
        f"  {len(samples.train):,} ratings train, {len(samples.test):,} later ones test: AUC {float_auc:.4f}"
    )

    step(console, "2", "Export it twice, its tables as int8 and as int4")
    for name, dtype in MODELS.items():
        run(
            console,
            f"tbe-export model --model examples.movielens.model:build --checkpoint {CHECKPOINT} "
            f"--repository {REPOSITORY} --name {name} --dtype {dtype} --scores",
        )

    step(console, "3", "Serve them with tritonserver")
    with run_server(REPOSITORY, Ports(grpc=0, http=0, operations=0), log=FOLDER / "tritonserver.log") as server:
        ready = ", ".join(f"{served.name} {served.versions[-1]}" for served in server.models)
        console.print(f"  ready on {server.grpc}: {ready}")

        step(console, "4", "Score the test ratings over gRPC: from embeddings, by the model here; and by the server")
        served = [_scored_here(console, server, name, model, samples) for name in MODELS]
        served.append(_scored_there(console, server, "movielens", samples))

    console.print(_last_page(float_auc, served, time.monotonic() - began))


def _scored_here(console: Console, server: Server, name: str, model: Ranker, samples: data.Samples) -> Served:
    """Score the test samples with `model`, but fetch its pooled embeddings from the server."""
    times_ms: list[float] = []
    with LookupClient(server.grpc, name, timeout_s=10) as client:

        def score(batch: data.Batch) -> Tensor:
            with _timed(times_ms):
                pooled = client.lookup({feature: batch.features[feature] for feature in FEATURES})
            logits: Tensor = model.dense({feature: torch.tensor(array) for feature, array in pooled.items()})
            return logits

        auc = train.test_auc(samples, _showing(console, name, samples, score))
    return _served(name, f"{MODELS[name]}, gRPC", auc, times_ms)


def _scored_there(console: Console, server: Server, name: str, samples: data.Samples) -> Served:
    """Have the server score the test samples: it has the dense part of the model, too."""
    times_ms: list[float] = []
    with LookupClient(server.grpc, name, timeout_s=10) as client:

        def score(batch: data.Batch) -> Tensor:
            with _timed(times_ms):
                scores = client.score({feature: batch.features[feature] for feature in FEATURES})
            return torch.tensor(scores["scores"])

        auc = train.test_auc(samples, _showing(console, f"{name}, scores", samples, score))
    return _served(name, f"{MODELS[name]}, scores", auc, times_ms)


@contextmanager
def _timed(times_ms: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times_ms.append(1e3 * (time.perf_counter() - start))


def _showing(
    console: Console, what: str, samples: data.Samples, score: Callable[[data.Batch], Tensor]
) -> Callable[[data.Batch], Tensor]:
    """`score`, with a line that shows how far it has come."""
    progress = iter(
        track(range(-(-len(samples.test) // train.TEST_BATCH)), f"  {what}", console=console, transient=True)
    )

    def shown(batch: data.Batch) -> Tensor:
        next(progress)
        return score(batch)

    return shown


def _served(name: str, what: str, auc: float, times_ms: list[float]) -> Served:
    full = times_ms[1:-1]  # the first call opens the channel, the last batch is short
    return Served(name, what, auc, float(np.percentile(full, 50)), float(np.percentile(full, 99)), len(times_ms))


def _last_page(float_auc: float, served: list[Served], seconds: float) -> Panel:
    notes = Table.grid(padding=(0, 2))
    notes.add_row("calls", f"{served[0].calls} × {train.TEST_BATCH} samples × {len(FEATURES)} features, each row")
    notes.add_row("bundle", str(REPOSITORY / "movielens" / "1"))
    notes.add_row("took", f"{seconds:.0f} s in all")
    notes.add_row("next", f".venv/bin/tbe-serve run {REPOSITORY}")
    notes.add_row("then", """echo '{"genres": [[3, 5], [], [1]]}' | .venv/bin/tbe-serve lookup movielens --table""")
    both = Table.grid()
    both.add_row(_results(float_auc, served))
    both.add_row("")
    both.add_row(notes)
    return Panel(
        both, title="MovieLens-100k, from training to gRPC", title_align="left", expand=False, padding=(1, 2)
    )


def _results(float_auc: float, served: list[Served]) -> Table:
    """The AUC, bytes and times of each model beside those of the float one."""
    bundles = {name: open_bundle(REPOSITORY / name / "1") for name in MODELS}
    results = Table(box=None, pad_edge=False)
    results.add_column("")
    for column in ("test AUC", "− float", "tables", "of float", "p50", "p99"):
        results.add_column(column, justify="right")
    before = sum(4 * table.rows * table.dim for table in bundles["movielens"].manifest.tables)
    results.add_row("float", f"{float_auc:.5f}", "", _kib(before), "100 %", "", "")
    for result in served:
        after = _weights_bytes(bundles[result.model])
        results.add_row(
            result.what,
            f"{result.auc:.5f}",
            f"{result.auc - float_auc:+.5f}",
            _kib(after),
            f"{after / before:.0%}".replace("%", " %"),
            f"{result.p50_ms:.2f} ms",
            f"{result.p99_ms:.2f} ms",
        )
    return results


def _weights_bytes(bundle: Bundle) -> int:
    return sum((bundle.path / name).stat().st_size for name in bundle.manifest.weights_files)


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:,.0f} KiB"


def step(console: Console, number: str, text: str) -> None:
    """Say what is done next."""
    console.print(f"\n[bold]{number}. {text}[/bold]")


def run(console: Console, command: str) -> None:
    """Show a command of ours as one would type it, and run it in this process, which has TorchRec by now."""
    console.print(f"  $ {command}", soft_wrap=True)
    name, *arguments = shlex.split(command)
    try:
        {"tbe-export": tbe_export, "tbe-serve": tbe_serve}[name](arguments)
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    main()
