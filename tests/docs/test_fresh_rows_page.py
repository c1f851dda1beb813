"""The first blocks of docs/fresh-rows.md change rows of a running server."""

import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from export import export_model
from serving.client import LookupClient
from tests.support.commands import tbe_export
from tests.support.models import Spec, collection
from tests.support.servers import running, tbe_serve

PAGE = (Path(__file__).parents[2] / "docs" / "fresh-rows.md").read_text()


def command(start: str) -> list[str]:
    """The words of the page's first command that starts with `start`."""
    return shlex.split(re.findall(rf"^\$ ({re.escape(start)}.*)", PAGE, re.MULTILINE)[0], comments=True)


def wait_for_row(client: LookupClient, row: int, number: float) -> None:
    deadline = time.monotonic() + 60
    while not (client.rows("item", [row])[0] == number).all():
        assert time.monotonic() < deadline, "the delta is not served"
        time.sleep(0.1)


def test_published_rows_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export_model(collection((Spec("item", 50, 8, "SUM", ("item_id",)),)), Path("repository"), "movies")
    assert tbe_serve(*command("tbe-serve configure")[1:]).returncode == 0
    with running(Path("repository")) as server, LookupClient(server.grpc, "movies", 60) as client:
        (publish,) = re.findall(
            r"^```python\n(from export import publish_delta\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL
        )
        exec(publish, {"ids": np.array([3, 5]), "rows": np.full((2, 8), 0.5, np.float32)})
        wait_for_row(client, 5, 0.5)
        save_file({"item/ids": np.array([5]), "item/rows": np.full((1, 8), 0.25, np.float32)}, "rows.safetensors")
        done = tbe_export(*command("tbe-export delta")[1:])
        assert done.exit_code == 0, done.output
        assert re.fullmatch(r"\S+/000000000002.safetensors: 1 row, delta 2 of version 1\n", done.output)
        wait_for_row(client, 5, 0.25)
        wait_for_row(client, 3, 0.5)
        assert re.search(r"^movies .* 2$", tbe_serve("status", server.grpc).stdout, re.MULTILINE)
