"""A router's manifest and those of its hosts are read strictly: docs/bundle.md, section 10."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export import ExportConfig, Sharding
from serving.bundle.load import open_bundle
from serving.errors import BundleError
from tests.support.hosts import export_hosts
from tests.support.models import SUM, collection

Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`b` is whole on host 0, `a` is cut over hosts 0 and 1."""
    sharding = Sharding(ranks=2, ranks_per_host=1, types={"a": "row_wise", "b": "table_wise"})
    router = export_hosts(tmp_path_factory.mktemp("hosts"), collection(SUM), ExportConfig(sharding=sharding))
    return router.parent.parent


@pytest.fixture
def router(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published / "movies" / "1", tmp_path / "1"))


@pytest.fixture
def host(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published / "movies-host-1" / "1", tmp_path / "1"))


def edit(bundle: Path, change: Change) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


PART = {"model": "movies", "host": 0, "plan": "0" * 64}
ONE_EACH = "hosts: expected one entry for each rank without a file of weights, hosts [0, 1]"
ITS_OWN = "hosts: expected a router's bundle, whose first rank, and no other, is its own"


COMPACTED = {"requires": ["compacted", "hosts"], "compacted": {"lineage": "0" * 32, "sequence": 3}}


def with_lineage(manifest: Any, lineage: str) -> Any:
    """Its hosts, which all go on with a lineage."""
    return [{**host, "lineage": lineage} for host in manifest["hosts"]]


def own_rank_too(manifest: Any) -> None:
    """Another rank of the router's, with no rows."""
    manifest["plan"]["ranks"].append({"host": -1, "device": "cpu", "weights": "weights.3.bin"})
    manifest["files"]["weights.3.bin"] = {"size_bytes": 0, "sha256": "0" * 64}


def no_own_rank(manifest: Any) -> None:
    manifest["plan"]["ranks"][0]["weights"] = None
    manifest["hosts"].insert(0, {**manifest["hosts"][0], "host": -1})


@pytest.mark.promise("A host's manifest that contradicts itself or its router's plan is refused")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda m: m["hosts"].pop(), ONE_EACH, id="host not named"),
        pytest.param(lambda m: m["hosts"].reverse(), ONE_EACH, id="another order"),
        pytest.param(lambda m: m["hosts"].append(m["hosts"][1]), ONE_EACH, id="twice"),
        pytest.param(lambda m: m.pop("hosts"), ONE_EACH, id="no hosts"),
        pytest.param(lambda m: m["plan"]["ranks"][2].update(host=0), "hosts [0, 0]", id="two ranks of a host"),
        pytest.param(lambda m: m.update(part_of=PART), ITS_OWN, id="part of something"),
        pytest.param(own_rank_too, ITS_OWN, id="two ranks of its own"),
        pytest.param(no_own_rank, ITS_OWN, id="no rank of its own"),
        pytest.param(lambda m: m["hosts"][0].update(model="../m"), "host 0: expected the name of a model", id="path"),
        pytest.param(lambda m: m["hosts"][1].update(model=""), "got '', 1 and", id="no name"),
        pytest.param(
            lambda m: m["hosts"][1].update({**m["hosts"][0], "host": 1}),
            "host 1: expected the model 'movies-host-1', got 'movies-host-0'",
            id="another host's bundle",
        ),
        pytest.param(
            lambda m: [m["hosts"][0].update(model="movies-host-1"), m["hosts"][1].update(model="movies-host-0")],
            "host 0: expected the model '<router>-host-0', got 'movies-host-1'",
            id="each other's names",
        ),
        pytest.param(
            lambda m: m["hosts"][1].update(model="books-host-1"),
            "host 1: expected the model 'movies-host-1', got 'books-host-1'",
            id="another router's",
        ),
        pytest.param(
            lambda m: m["hosts"][0].update(model="movies"),
            "host 0: expected the model '<router>-host-0', got 'movies'",
            id="a name that is no host's",
        ),
        pytest.param(
            lambda m: m["hosts"][0].update(model="movies-host-00"),
            "host 0: expected the model '<router>-host-0', got 'movies-host-00'",
            id="a number with a zero before it",
        ),
        pytest.param(
            lambda m: m["hosts"][1].update(manifest=m["hosts"][0]["manifest"]),
            "expected different names, got 2 of this one",
            id="one bundle twice",
        ),
        pytest.param(lambda m: m["hosts"][0].update(version=0), "got 'movies-host-0', 0 and", id="version"),
        pytest.param(lambda m: m["hosts"][0].update(version=2**63), f"{2**63} and", id="large version"),
        pytest.param(lambda m: m["hosts"][0].update(manifest="0" * 63), "a SHA-256", id="digest"),
        pytest.param(lambda m: m["hosts"][0].update(manifest="A" * 64), "a SHA-256", id="upper case"),
        pytest.param(lambda m: m["hosts"][0].update(lineage="0" * 32), f"and '{'0' * 32}'", id="a lineage alone"),
        pytest.param(lambda m: m.update(COMPACTED), "and None", id="no lineage"),
        pytest.param(
            lambda m: m.update(COMPACTED, hosts=with_lineage(m, "../m")), "and '../m'", id="no lineage's name"
        ),
        pytest.param(lambda m: m["hosts"][0].update(more=1), "unknown field `more`", id="unknown key"),
        pytest.param(lambda m: m.update(id_dtype="INT16"), "INT16", id="id_dtype"),
        pytest.param(lambda m: m.update(requires=[]), "requires: expected ['hosts'", id="not required"),
        pytest.param(
            lambda m: m["plan"]["ranks"][1].pop("weights"), "missing required field `weights`", id="weights"
        ),
    ],
)
def test_a_contradictory_router_manifest_is_refused(router: Path, change: Change, message: str) -> None:
    open_bundle(router)
    edit(router, change)
    with pytest.raises(BundleError, match=re.escape(message)) as refused:
        open_bundle(router)
    assert str(router) in str(refused.value)


@pytest.mark.promise("A host's manifest that contradicts itself or its router's plan is refused")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda m: m.pop("part_of"), "requires: expected ['int32_ids'], which is what the bundle has", id="neither"
        ),
        pytest.param(lambda m: m["part_of"].pop("plan"), "missing required field `plan`", id="half"),
        pytest.param(lambda m: m["plan"]["ranks"][0].update(weights=None), "hosts [1]", id="no file"),
        pytest.param(lambda m: m.update(requires=[]), "requires: expected ['hosts'", id="not required"),
    ],
)
def test_a_contradictory_host_manifest_is_refused(host: Path, change: Change, message: str) -> None:
    open_bundle(host)
    edit(host, change)
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(host)


def test_a_bundle_without_hosts_needs_a_file_for_each_rank(mixed: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(mixed, tmp_path / "1"))
    edit(bundle, lambda m: m["plan"]["ranks"][0].update(weights=None))
    with pytest.raises(BundleError, match=r"hosts: expected one entry for each rank without a file"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("key", "value"), [("plan", "zz"), ("model", "a/b"), ("host", -1), ("host", 9)], ids=lambda value: str(value)
)
def test_an_invalid_part_of_is_refused(host: Path, key: str, value: Any) -> None:
    edit(host, lambda manifest: manifest["part_of"].update({key: value}))
    with pytest.raises(
        BundleError, match="part_of: expected the name of a model, the host of the only rank and a SHA"
    ):
        open_bundle(host)
