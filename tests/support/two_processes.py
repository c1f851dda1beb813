"""Two processes that train one model, as `torchrun` would start them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

WORLD_SIZE = 2


def run_module(module: str, *arguments: str) -> None:
    """Run `python -m module arguments`. What it printed is told if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"


def spawn_both(train: Callable[..., None], *arguments: Any) -> None:
    """Call `train(rank, *arguments, meeting)` in two processes. They meet at a file: a port that is free when it is
    asked for may be taken when it is used."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_train_and_end, args=(train, *arguments, f"{folder}/meeting"), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]


def _train_and_end(rank: int, train: Callable[..., None], *arguments: Any) -> None:
    """End without the interpreter's own end: where the model still holds the group, a thread of gloo may drop a tensor
    during that, and torch aborts (pytorch/pytorch#190489)."""
    train(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def process_group(rank: int, meeting: str) -> Iterator[None]:
    """A gloo process group over loopback. None leaves it before both are done: gloo's other end would fail."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ.update({name: str(number) for name, number in names.items()}, GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD_SIZE)
    yield
    dist.barrier()
    dist.destroy_process_group()
