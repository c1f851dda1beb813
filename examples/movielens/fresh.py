"""`make demo-fresh`: a model that is trained while it is served, beside the same model as it was.

The later ratings come in order of time, fifty at once. The server scores each first, by a model that stays as it was
exported and by one that deltas keep fresh. Then the rows learn from them, and those that changed are published. The
dense part stays as it is; a third model, in this process, trains that, too.
"""

import copy
import logging
import shutil
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torchmetrics.functional.classification import binary_auroc

from examples.movielens import data, train
from examples.movielens.demo import run, step
from examples.movielens.model import FEATURES, TABLES, Ranker, to_kjt
from export import publish_delta
from serving.client import LookupClient
from serving.server import Ports, Server, run_server

FOLDER = Path("build/demo-fresh")
REPOSITORY = FOLDER / "repository"
CHECKPOINT = FOLDER / "ranker.pt"
CURVE = FOLDER / "auc.png"
# Ratings that come at once; and of how many the curve shows the AUC.
AT_ONCE, WINDOW = 50, 4000
# Rows learn by plain gradient descent, which changes only those that were looked up.
RATE = 1.0
WHAT = {"stale": "as it was exported", "fresh": "rows fresh", "trained": "rows and dense part, here"}


@dataclass(slots=True)
class Seen:
    """What came out: labels, and scores by kind of model; and how long each delta took to be served, in seconds."""

    labels: list[npt.NDArray[Any]] = field(default_factory=list)
    scores: dict[str, list[npt.NDArray[Any]]] = field(default_factory=lambda: {kind: [] for kind in WHAT})
    served_s: list[float] = field(default_factory=list)
    rows: int = 0

    def auc(self, kind: str, last: slice = slice(None)) -> float:
        """The area under the ROC curve, of some of the ratings."""
        scores, labels = np.concatenate(self.scores[kind])[last], np.concatenate(self.labels)[last]
        return float(binary_auroc(torch.from_numpy(scores), torch.from_numpy(labels).long()))


def main() -> None:
    """Run it in the folder build/demo-fresh, which is emptied first."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    shutil.rmtree(FOLDER, ignore_errors=True)

    step(console, "1", "Train a TorchRec model on MovieLens-100k, on the earlier 80 % of the ratings")
    samples = data.read_samples()
    model = train.train(samples, console)
    train.save(model, CHECKPOINT)

    step(console, "2", "Export it twice: one to stay as it is, and one that deltas keep fresh")
    for name in ("stale", "fresh"):
        run(
            console,
            f"tbe-export model --model examples.movielens.model:build --checkpoint {CHECKPOINT} "
            f"--repository {REPOSITORY} --name {name} --scores",
        )
    run(console, f"tbe-serve configure {REPOSITORY / 'fresh'} --weights-memory live")

    step(console, "3", f"Serve both; score the later ratings in order, {AT_ONCE} at once, and learn from them")
    with run_server(REPOSITORY, Ports(grpc=0, http=0, operations=0), log=FOLDER / "tritonserver.log") as server:
        outcome = _follow(console, server, model, samples)
    _draw(outcome)
    console.print(_results(outcome))
    console.print(
        f"  {len(outcome.served_s)} deltas of {outcome.rows / len(outcome.served_s):.0f} rows; each was served "
        f"{1e3 * float(np.median(outcome.served_s)):.0f} ms after it was published (median; 99 of 100 within "
        f"{1e3 * float(np.percentile(outcome.served_s, 99)):.0f} ms). The curve is in {CURVE}"
    )


def _follow(console: Console, server: Server, model: Ranker, samples: data.Samples) -> Seen:
    whole = copy.deepcopy(model)
    rows_of_model = torch.optim.SGD(model.embeddings.parameters(), lr=RATE)
    of_whole = [
        torch.optim.SGD(whole.embeddings.parameters(), lr=RATE),
        torch.optim.AdamW(whole.dense.parameters(), lr=1e-3, weight_decay=1e-2),
    ]
    outcome = Seen()
    batches = [*samples.batches(samples.test, AT_ONCE)]
    with LookupClient(server.grpc, "stale", 10) as stale, LookupClient(server.grpc, "fresh", 10) as fresh:
        for number, batch in enumerate(track(batches, "  ratings", console=console, transient=True), start=1):
            features = {feature: batch.features[feature] for feature in FEATURES}
            outcome.labels.append(batch.labels)
            outcome.scores["stale"].append(stale.score(features)["scores"])
            outcome.scores["fresh"].append(fresh.score(features)["scores"])
            with torch.no_grad():
                outcome.scores["trained"].append(whole(to_kjt(batch)).numpy())
            _learn(model, [rows_of_model], batch)
            _learn(whole, of_whole, batch)
            changed = _rows_of(model, batch)
            publish_delta(REPOSITORY, "fresh", changed)
            outcome.rows += sum(len(ids) for ids, _ in changed.values())
            outcome.served_s.append(_until_served(server, number))
    return outcome


def _learn(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: data.Batch) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(to_kjt(batch)), torch.from_numpy(batch.labels))
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()


def _rows_of(model: Ranker, batch: data.Batch) -> dict[str, tuple[npt.NDArray[np.int64], torch.Tensor]]:
    """The rows that a batch looked up, by table: no others changed."""
    changed = {}
    for table, (_, _, features) in TABLES.items():
        ids = np.unique(np.concatenate([batch.features[feature][0] for feature in features]))
        weight = model.embeddings.embedding_bags[table].weight
        changed[table] = ids, weight.detach()[torch.from_numpy(ids)]
    return changed


def _until_served(server: Server, number: int) -> float:
    """Seconds until the server says that a delta which was just published is applied."""
    began = time.monotonic()
    line = f'tbe_delta_sequence{{model="fresh",version="1"}} {number}\n'
    while True:
        with urllib.request.urlopen(f"{server.operations}/metrics") as page:
            if line in page.read().decode():
                return time.monotonic() - began
        time.sleep(0.01)


def _results(outcome: Seen) -> Table:
    results = Table(box=None, pad_edge=False)
    results.add_column("")
    for column in ("AUC", "− stale"):
        results.add_column(column, justify="right")
    stale = outcome.auc("stale")
    for kind, what in WHAT.items():
        results.add_row(
            what, f"{outcome.auc(kind):.4f}", f"{outcome.auc(kind) - stale:+.4f}" if kind != "stale" else ""
        )
    return results


def _draw(outcome: Seen) -> None:
    """The AUC of the last ratings, as time goes by."""
    total = sum(map(len, outcome.labels))
    ends = range(WINDOW, total + 1, WINDOW // 8)
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for kind, what in WHAT.items():
        axes.plot(ends, [outcome.auc(kind, slice(end - WINDOW, end)) for end in ends], label=what)
    axes.set_xlabel("later ratings, in order of time")
    axes.set_ylabel(f"AUC of the last {WINDOW:,}")
    axes.legend(frameon=False, ncols=len(WHAT), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(CURVE, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
