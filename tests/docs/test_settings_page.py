"""docs/settings.md has the tables that the code makes, and its example names every key and is taken as it is."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from docs.site.settings import settings_page
from export import ExportConfig, Sharding
from serving.model.settings import ServingSettings
from tests.support.commands import tbe_export

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text()
BY_TABLE, EXAMPLE = (text.split("```")[0] for text in PAGE.split("```toml\n")[1:])
MODULE = """
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

def build():
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=name, num_embeddings=100, embedding_dim=64, feature_names=[name])
            for name in ("user", "item", "words")
        ],
        device="meta",
    )
"""


def documented(heading: str) -> set[str]:
    """The keys of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("heading", "keys"),
    [
        pytest.param(
            "Export",
            fields(ExportConfig) - {"sharding", "serving", "trained_memory_bytes"} | {"trained_memory"},
            id="file",
        ),
        # `machine_bytes` is measured, and a file says bytes with their unit.
        pytest.param(
            "[sharding]",
            fields(Sharding) - {"machine_bytes", "memory_bytes", "router_bytes", "network_bytes_per_s"}
            | {"memory_per_rank", "router_memory", "network_bandwidth"},
            id="sharding",
        ),
        pytest.param("[serving]", fields(ServingSettings), id="serving"),
    ],
)
def test_the_page_names_exactly_the_keys_that_are_taken(heading: str, keys: set[str]) -> None:
    assert documented(heading) == keys


def test_the_example_has_every_key() -> None:
    example = tomllib.loads(EXAMPLE)
    assert example.pop("sharding").keys() == documented("[sharding]") - {"plan", "traffic"}
    assert example.pop("serving").keys() == documented("[serving]")
    assert example.keys() == documented("Export") - {"checkpoint_prefix", "example", "labelled"}


def test_the_example_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "example_of_the_page.py").write_text(MODULE)
    (tmp_path / "export.toml").write_text(EXAMPLE)
    done = tbe_export("plan", "--model", "example_of_the_page:build", "--config", "export.toml", "--json")
    assert done.exit_code == 0, done.stderr
    # 8 ranks are on two hosts. `user` is cut over them, all else is in the router.
    assert [rank["host"] for rank in json.loads(done.stdout)["ranks"]] == [-1, 0, 1]


def test_the_tables_are_those_of_the_code() -> None:
    assert settings_page(PAGE) == PAGE, "run `make settings`"


def test_a_table_of_older_settings_is_written_again() -> None:
    older = PAGE.replace("| `instances` | *integer ≥ 1; default 1.*", "| `instances` | *integer ≥ 1; default 2.*")
    assert older != PAGE
    assert settings_page(older) == PAGE


def test_the_example_by_table_is_one_key_in_two_forms() -> None:
    for line in BY_TABLE.splitlines():
        assert tomllib.loads(line).keys() == {"dtype"}
