"""Every command of the runbook runs."""

import re
import shlex
import subprocess
import urllib.request
from pathlib import Path

import pytest

from export import export_model
from tests.support.certificates import write_certificates
from tests.support.commands import tbe_export
from tests.support.models import SUM, collection
from tests.support.servers import Running, running, tbe_serve

PAGE = Path(__file__).parents[2] / "docs" / "runbook.md"


def commands() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def run(words: list[str], server: Running) -> str:
    """What a command prints; it has to succeed."""
    match words:
        case ["curl", "-s", url]:
            with urllib.request.urlopen(
                url.replace("http://127.0.0.1:8002", server.operations), timeout=30
            ) as response:
                said: str = response.read().decode()
                return said
        case ["curl", "-s", url, "|", "grep", "-E", pattern]:
            return "\n".join(
                line for line in run(["curl", "-s", url], server).splitlines() if re.search(pattern, line)
            )
        case ["tbe-serve", *arguments]:
            options = ["--url", server.grpc] if arguments[0] == "load" else []
            if arguments == ["status"]:
                options = [server.grpc]
            called = tbe_serve(*[argument.replace("127.0.0.1:8001", server.grpc) for argument in arguments], *options)
            assert called.returncode == 0, called.stderr
            return called.stdout
        case ["tbe-export", *arguments]:
            result = tbe_export(*arguments)
            assert result.exit_code == 0, result.output
            output: str = result.output
            return output
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        export_model(collection(SUM), tmp_path / "repository", "movies")
    write_certificates(tmp_path, tls="127.0.0.1")
    (tmp_path / "tls.crt").write_bytes((tmp_path / "tls.pem").read_bytes())
    with running(tmp_path / "repository") as server:
        said = {
            line: run(shlex.split(line.replace("/var/tmp", str(tmp_path)), comments=True), server)
            for line in commands()
        }
    assert said.pop("truncate --size 0 /var/tmp/movies.jsonl") == ""
    assert len(said) >= 10
    assert all(said.values())
    assert said["curl -s http://127.0.0.1:8002/readyz"] == "ready\n"
    assert "movies" in said["tbe-serve status --fleet 127.0.0.1:8001"]
    assert "movies: version 2 → 2" in said["tbe-serve load movies"]
