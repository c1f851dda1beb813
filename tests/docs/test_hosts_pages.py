"""The commands and programs of docs/sharding.md and docs/hosts.md run as a reader would run them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.model.config_file import read_config, settings_of
from serving.model.settings import table
from tests.docs.test_readme import ROOT, SHARDING, blocks, export, package, run
from tests.support.deadlines import PATIENT_S
from tests.support.hosts import patient
from tests.support.servers import Running, running

HOSTS = (ROOT / "docs" / "hosts.md").read_text()


@dataclass(frozen=True)
class Built:
    """What the section of docs/sharding.md built: `folder`, and the server of a router and its hosts."""

    folder: Path
    server: Running


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("readme")
    package(folder)
    (command,) = (block for block in blocks(SHARDING, "", "tbe-export model") if "--hosts-as-models" in block)
    assert "published" in export(command, folder)
    (serve,) = blocks(SHARDING, "", "tbe-serve run")
    repository, *options = serve.split()[2:]
    run(f"tbe-serve configure {repository}/movies --shard-timeout-ms {1000 * PATIENT_S:.0f}", folder)
    with running(folder / repository, *options) as server:
        yield Built(folder, server)


def test_sharding_s_router_is_looked_up(built: Built) -> None:
    (lookup,) = blocks(SHARDING, "", "printf")
    shown = run(lookup.replace("--table", f"--table --url {built.server.grpc} --timeout-s {PATIENT_S}"), ROOT)
    assert shown.count("item_id") == 2


def test_the_engines_of_the_page_of_hosts_answer(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(built.folder)
    first, second = built.server.hosts
    names: dict[str, Any] = {"patient": patient}
    engine, for_asyncio = re.findall(r"^```python\n(.*?)^```$", HOSTS, re.MULTILINE | re.DOTALL)
    engine = re.sub(r"hosts=(\{.*?\})", r"hosts=patient(\1)", engine)
    for text in (engine, for_asyncio.replace("timeout_s=0.1", "timeout_s=20")):
        exec(text.replace("a:8001", first).replace("b:8001", first).replace("c:8001", second), names)
    assert names["answer"]["item_id"].shape == (2, 32)
    assert len(names["answers"]) == 100
    np.testing.assert_array_equal(names["answers"][7]["item_id"][0], names["answer"]["item_id"][1])


def test_the_settings_of_the_page_of_hosts_are_taken(built: Built) -> None:
    for text in re.findall(r"^```\n(tbe-serve configure .*?)^```$", HOSTS, re.MULTILINE | re.DOTALL):
        run(text, built.folder)
    settings = settings_of(read_config(built.folder / "repository" / "movies"))
    assert settings.hosts == {"0": "a:8001,b:8001", "1": "dns:///movies-host-1:8001"}
    assert (settings.shard_timeout_ms, settings.on_shard_failure) == (100, {"item*": "zero"})


def test_the_page_of_hosts_names_every_setting_of_routers() -> None:
    named = set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", HOSTS, re.MULTILINE))))
    options = {
        (setting.flag or f"--{field.name.replace('_', '-')}")[2:]
        for field, setting in table()
        if setting.is_of_router
    }
    assert options <= named
