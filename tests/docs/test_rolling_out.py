"""The commands of docs/rolling-out.md run, one after another, and do what the page says."""

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from export import export_model
from serving.client.connection import Connection
from serving.client.server_info import query_servers
from tests.support.commands import tbe_export
from tests.support.models import SUM, collection
from tests.support.servers import Running, running, tbe_serve

PAGE = Path(__file__).parents[2] / "docs" / "rolling-out.md"


def section(heading: str) -> Iterator[list[str]]:
    """The words of each command that a section has in blocks without a language."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in () if language else block.splitlines():
            yield shlex.split(line, comments=True)


def start(words: list[str], servers: ExitStack) -> Running:
    """Start `tbe-serve run REPOSITORY …` on free ports."""
    assert words[:2] == ["tbe-serve", "run"]
    options = [word for word in words[3:] if word not in ("--grpc-port", "9001", "--operations-port", "9002")]
    return servers.enter_context(running(Path(words[2]), *options))


def ask(words: list[str], **servers: Running) -> tuple[int, str]:
    """Run `tbe-serve status …` with real addresses for those of the page."""
    ports = {"localhost:8001": "one", "localhost:9001": "two"}
    said = " ".join(words[1:])
    for address, name in ports.items():
        if address in said:
            said = said.replace(address, servers[name].grpc)
    done = tbe_serve(*said.split())
    return done.returncode, done.stdout


def release(words: list[str]) -> None:
    assert words[:2] == ["tbe-export", "release"]
    done = tbe_export(*words[1:])
    assert done.exit_code == 0, done.output


def wait_for_versions(server: Running, *versions: int) -> None:
    deadline = time.monotonic() + 60
    while (servers := query_servers(Connection(addresses=[server.grpc], timeout_s=5)))[0].models != {
        "movies": versions
    }:
        assert time.monotonic() < deadline, servers
        time.sleep(0.1)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        export_model(collection(SUM, seed=seed), Path("repository"), "movies")
    return tmp_path / "repository"


@pytest.mark.long
def test_the_commands_of_pins_and_canaries_run(repository: Path) -> None:
    verify = ["tbe-export", "verify", "repository/movies/2"]
    assert f"\n```\n{' '.join(verify)}\n```\n" in PAGE.read_text()
    assert tbe_export(*verify[1:]).exit_code == 0
    run, status, fleet = section("Pins")
    canary, both = section("A canary")
    with ExitStack() as servers:
        one, two = start(run, servers), start(canary, servers)
        code, said = ask(status, one=one)
        assert (code, "--serve" in said) == (0, True)
        assert ask(fleet, one=one)[0] == 0
        code, said = ask(both, one=one, two=two)
        assert code == 1
        assert [line.split()[2:] for line in said.splitlines()[1:3]] == [
            ["movies", "1", "ready"],
            ["movies", "2", "ready"],
        ]
    assert not [path for path in repository.iterdir() if path.name != "movies"]


def test_the_commands_of_releases_run(repository: Path) -> None:
    first, run, forward, back, both, alone = section("Releases")
    release(first)
    assert (repository / "movies.release.json").exists()
    with ExitStack() as servers:
        server = start([*run, "--unload-after-s", "0"], servers)
        wait_for_versions(server, 1)
        for command, versions in ((forward, (2,)), (back, (1,)), (both, (1, 2)), (alone, (1,))):
            release(command)
            wait_for_versions(server, *versions)


def test_the_page_names_the_default_of_unload_after_s() -> None:
    (named,) = re.findall(r"`--unload-after-s`\s\((\d+)\) seconds", PAGE.read_text())
    assert f"Default: {named}." in " ".join(tbe_serve("run", "--help").stdout.split())
