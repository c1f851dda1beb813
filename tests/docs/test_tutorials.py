"""The tutorials work, step by step, as a reader would follow them."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_readme import ROOT, patient, run
from tests.support.deadlines import PATIENT_S
from tests.support.servers import running

CALL = f" --timeout-s {PATIENT_S}"


def steps(page: str) -> list[tuple[str, str]]:
    """The blocks of a tutorial, as pairs of language and text, apart from those that show an output."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if block[0] != "text"]


def commands(text: str, folder: Path) -> str:
    """What a shell block prints, run in the folder, with its Python files on the path."""
    path = f"export PYTHONPATH={shlex.quote(str(ROOT))}:.\n"
    return run(path + text.replace("python ranker.py", f"{shlex.quote(sys.executable)} ranker.py"), folder)


def python(text: str, address: str) -> dict[str, Any]:
    """The names that a Python block makes, with a server at this address."""
    names: dict[str, Any] = {}
    exec(patient(text, address), names)
    return names


@pytest.mark.long
def test_the_tutorial_of_a_ranker(tmp_path: Path) -> None:
    file, train, export, serve, score, rank, again, load, back = steps("tutorial-ranker.md")
    (tmp_path / "ranker.py").write_text(file[1])
    assert "loss 0." in commands(train[1], tmp_path)
    assert "published" in commands(export[1], tmp_path)
    assert serve[1] == "tbe-serve run repository\n"
    with running(tmp_path / "repository") as server:
        likes, dislikes = python(score[1], server.grpc)["answer"]["click"]
        assert likes > 0.6 > 0.4 > dislikes
        assert python(rank[1], server.grpc)["best"] in (1, 2)
        assert "published" in commands(again[1], tmp_path)
        for step, version in ((load, 2), (back, 1)):
            commands(step[1].strip() + f" --url {server.grpc}" + CALL, tmp_path)
            assert python(score[1], server.grpc)["answer"].version == version


@pytest.mark.long
def test_the_tutorial_of_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan, export, move, *servers, lookup, lost, zero = steps("tutorial-hosts.md")
    (tmp_path / "tables.py").write_text(file[1])
    assert "hosts 0–1" in commands(plan[1], tmp_path)
    assert "published" in commands(export[1], tmp_path)
    commands(move[1], tmp_path)
    host_0, host_1, addresses, router = (text for _, text in servers)
    for text, folder in ((host_0, "host-0"), (host_1, "host-1"), (router, "router")):
        assert text.startswith(f"tbe-serve run {folder}")
    with running(tmp_path / "host-0") as first, running(tmp_path / "host-1") as second:
        for port, server in (("9001", first), ("9011", second)):
            addresses = addresses.replace(f"localhost:{port}", server.grpc)
        commands(addresses.strip() + f" --shard-timeout-ms {1000 * PATIENT_S:.0f}", tmp_path)
        with running(tmp_path / "router") as server:
            assert python(lookup[1], server.grpc)["answer"]["item"].shape == (2, 32)
            second.process.terminate()
            second.process.wait()
            capsys.readouterr()
            python(lost[1], server.grpc)
            shown = capsys.readouterr().out
            assert "(2, 8)" in shown
            assert "host 1 (shop-host-1" in shown
            commands(zero[1], tmp_path)


def test_both_tutorials_together_are_short() -> None:
    words = sum(
        len((ROOT / "docs" / page).read_text().split()) for page in ("tutorial-ranker.md", "tutorial-hosts.md")
    )
    assert words <= 2500
