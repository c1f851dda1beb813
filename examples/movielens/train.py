"""Train the model on the earlier ratings, and test it on the later ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from examples.movielens.data import Batch, Samples
from examples.movielens.model import Ranker, build, to_kjt

SEED = 7
EPOCHS = 3
BATCH = 256
TEST_BATCH = 128


def train(samples: Samples, console: Console) -> Ranker:
    """Train a model. The seeds are fixed, so it is the same every time."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    loss_of = torch.nn.BCEWithLogitsLoss()
    model.train()
    order = np.concatenate([random.permutation(samples.train) for _ in range(EPOCHS)])
    steps = -(-len(order) // BATCH)
    for batch in track(samples.batches(order, BATCH), "training", total=steps, console=console, transient=True):
        optimizer.zero_grad()
        loss = loss_of(model(to_kjt(batch)), torch.from_numpy(batch.labels))
        loss.backward()
        optimizer.step()
    return model.eval()


def save(model: Ranker, path: Path) -> None:
    """Write the model's state dict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)


def test_auc(samples: Samples, score: Callable[[Batch], Tensor]) -> float:
    """Area under the ROC curve of `score` over the test samples."""
    scores, labels = [], []
    with torch.inference_mode():
        for batch in samples.batches(samples.test, TEST_BATCH):
            scores.append(score(batch))
            labels.append(_int_labels(batch.labels))
    return float(binary_auroc(torch.cat(scores), torch.cat(labels)))


def _int_labels(labels: npt.NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(labels).long()
