"""A router is verified with the bundles of its hosts; versions that a router names are not pruned."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from export import export_model
from export.__main__ import app
from export.errors import ModelError
from export.parity.verify import ComparedModel, Verification, verify
from export.publish.published import prune
from export.trained.tables import collect_tables
from serving.bundle.load import digest_file, open_bundle
from serving.errors import BundleError
from tests.export.test_hosts import CONFIG, mixed
from tests.support.hosts import MODEL, edit_manifest
from tests.support.models import MIXED, collection

pytestmark = pytest.mark.usefixtures("any_torchscript")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, any_torchscript: None) -> Path:  # noqa: ARG001
    return export_model(mixed(), tmp_path_factory.mktemp("set") / "r", MODEL, CONFIG)


@pytest.fixture
def router(published: Path, tmp_path: Path) -> Path:
    """The router's bundle, in a copy of the repository."""
    shutil.copytree(published.parent.parent, tmp_path / "r")
    return tmp_path / "r" / MODEL / "1"


def host(router: Path, number: int) -> Path:
    return router.parent.parent / f"{MODEL}-host-{number}" / "1"


def overwrite_row(bundle: Path) -> None:
    """Change a stored number, and have the manifest agree, as a publisher could."""
    weights = bundle / "weights.0.bin"
    content = bytearray(weights.read_bytes())
    content[2:4] = np.float16(9).tobytes()  # the bias of the first row
    weights.write_bytes(content)
    files = open_bundle(bundle).manifest.files
    edit_manifest(bundle, files=files | {weights.name: digest_file(weights)})


def with_floats(router: Path, seed: int = 0) -> Verification:
    return verify(router, ComparedModel(collect_tables(collection(MIXED, seed=seed))))


def test_a_complete_router_with_its_hosts_passes_verify(router: Path) -> None:
    result = verify(router)
    assert (result.failures, result.absent, result.measured) == ((), (), False)
    assert with_floats(router).failures == ()
    assert with_floats(router).measured
    assert {line.split(":")[0] for line in with_floats(router, seed=1).failures} == {
        f"table '{spec.name}'" for spec in MIXED
    }
    for number in range(3):
        assert verify(host(router, number)).failures == ()


def test_a_host_s_files_are_compared_with_their_digests(router: Path) -> None:
    content = bytearray((host(router, 1) / "weights.0.bin").read_bytes())
    content[-1] ^= 1
    (host(router, 1) / "weights.0.bin").write_bytes(content)
    with pytest.raises(BundleError, match=r"movies-host-1/1/weights.0.bin: expected SHA-256"):
        verify(router)


def test_another_bundle_of_a_host_is_not_the_router_s(router: Path) -> None:
    overwrite_row(host(router, 2))
    with pytest.raises(
        BundleError, match=r"movies-host-2/1: expected the bundle with SHA-256 \w+ of its manifest, which "
    ):
        verify(router)


def test_a_router_without_its_hosts_is_verified_alone(router: Path) -> None:
    shutil.rmtree(host(router, 0).parent)
    result = verify(router)
    assert result.absent == (host(router, 0),)
    assert result.failures == ()
    with pytest.raises(ModelError, match="movies-host-0/1: is missing"):
        with_floats(router)
    done = CliRunner().invoke(app, ["verify", str(router)])
    assert done.exit_code == 0
    assert "movies-host-0/1: missing: its rows were not read, and no answers were compared" in done.output
    content = bytearray((router / "weights.0.bin").read_bytes())
    content[-1] ^= 1
    (router / "weights.0.bin").write_bytes(content)
    with pytest.raises(BundleError, match=r"movies/1/weights.0.bin: expected SHA-256"):
        verify(router)


def test_a_router_without_the_parity_of_a_table_is_refused(router: Path) -> None:
    """No reader needs it to answer. `verify` does."""
    first, *rest = open_bundle(router).manifest.parity
    edit_manifest(router, parity=tuple(rest))
    with pytest.raises(BundleError, match=rf"parity: expected each table once, got no table {first.table!r}"):
        verify(router)


def test_a_host_s_shards_are_not_compared_with_whole_tables(router: Path) -> None:
    with pytest.raises(ModelError, match="holds shards of 'movies': verify the bundle of"):
        with_floats(host(router, 0))


def test_versions_of_hosts_that_a_router_names_stay(router: Path) -> None:
    repository = router.parent.parent
    for _ in range(2):
        export_model(mixed(), repository, MODEL, CONFIG)
    of_host = repository / f"{MODEL}-host-1"
    fates = {fate.version: fate.kept_because for fate in prune(of_host, 1)}
    assert fates == {3: "among the newest 1", 2: "movies version 2 names it", 1: "movies version 1 names it"}
    assert {fate.version: fate.kept_because for fate in prune(repository / MODEL, 2)}[1] is None
    fates = {fate.version: fate.kept_because for fate in prune(of_host, 1)}
    assert fates == {3: "among the newest 1", 2: "movies version 2 names it", 1: None}
    assert sorted(path.name for path in of_host.iterdir()) == ["2", "3", "config.pbtxt"]


def test_host_versions_named_by_a_router_are_kept_for_any_path(router: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(mixed(), router.parent.parent, MODEL, CONFIG)
    of_host = router.parent.parent / f"{MODEL}-host-1"
    monkeypatch.chdir(of_host / "2")
    assert [fate.kept_because for fate in prune(Path(".."), 1)] == ["among the newest 1", "movies version 1 names it"]
    assert sorted(path.name for path in of_host.iterdir()) == ["1", "2", "config.pbtxt"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda manifest: manifest.write_text(
            manifest.read_text().replace('"format_version": 10', '"format_version": 99')
        ),
        lambda manifest: manifest.write_text(""),
    ],
    ids=["of a newer tbe-serving", "damaged"],
)
def test_host_versions_are_kept_while_a_router_cannot_be_read(router: Path, harm: Callable[[Path], object]) -> None:
    export_model(mixed(), router.parent.parent, MODEL, CONFIG)
    harm(router / "manifest.json")
    of_host = router.parent.parent / f"{MODEL}-host-1"
    fates = [fate.kept_because for fate in prune(of_host, 1)]
    assert fates == ["among the newest 1", "movies version 1 may name it, and cannot be read"]
    shutil.rmtree(router)
    assert [fate.kept_because for fate in prune(of_host, 1)] == ["among the newest 1", None]


def test_inspect_shows_which_router_and_hosts_belong_together(router: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(router)]).output
    for number in range(3):
        assert f"{MODEL}-host-{number}" in shown
    shown = CliRunner().invoke(app, ["inspect", str(host(router, 1))]).output
    assert f"host 1 of '{MODEL}'" in shown
