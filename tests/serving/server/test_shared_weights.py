"""Servers on one bundle, and instances of a model, share its weights."""

import os
import shutil
from pathlib import Path

import numpy as np

from export import export_model
from serving.client import LookupClient
from serving.server import run_server
from tests.support.models import Spec, collection
from tests.support.servers import (
    FREE,
)


def weights_pss_bytes(process: int, name: str) -> list[int]:
    """Proportional memory of every mapping of a file called `name` in a process and its children."""
    sizes = []
    for entry in [process, *descendants(process)]:
        mapping = False
        for line in Path(f"/proc/{entry}/smaps").read_text().splitlines():
            first = line.split()[0]
            if not first.endswith(":"):
                mapping = line.endswith(name)
            elif mapping and first == "Pss:":
                sizes.append(1024 * int(line.split()[1]))
    return sizes


def descendants(process: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [process for child in children for process in descendants(child)]


def test_servers_and_instances_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    """Two servers, the second with two instances of the model, on the same file."""
    rows = 400_000
    bundle = export_model(collection((Spec("t", rows, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    size = (bundle / "weights.0.bin").stat().st_size
    shutil.copytree(tmp_path / "r", tmp_path / "two", copy_function=os.link)
    config = tmp_path / "two" / "m" / "config.pbtxt"
    text = config.read_text()
    config.unlink()
    config.write_text(text.replace("count: 1", "count: 2"))
    every_row = {"x": (np.arange(rows), np.array([rows]))}
    ports = FREE
    with (
        run_server(tmp_path / "r", ports, log=tmp_path / "log1") as one,
        run_server(tmp_path / "two", ports, log=tmp_path / "log2") as two,
    ):
        for server in (one, two):
            with LookupClient(server.grpc, "m", timeout_s=30) as client:
                client.lookup(every_row)
        pss = [weights_pss_bytes(server.process.pid, "/m/1/weights.0.bin") for server in (one, two)]
    assert [len(share) for share in pss] == [1, 2]
    assert 0 < sum(map(sum, pss)) < 1.1 * size  # what is shared counts once; what the kernel took back, not at all
