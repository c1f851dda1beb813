"""Repositories in an object store, on a real S3 server: published and brought whole, served and rolled out from there."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from export import ExportConfig, Sharding, export_model, staged
from export.errors import PublishError
from export.publish.push import push
from serving.__main__ import app as serve_app
from serving.bundle.load import hold, open_bundle, verify_digests
from serving.bundle.release import read_release
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import BundleError, ConfigurationError, ServerUnavailable
from serving.server.mirror import Mirror, mirror_of
from serving.store import Store, versions_in
from tests.support.commands import TRAINED, tbe_export
from tests.support.deadlines import PATIENT_S
from tests.support.host_faults import until
from tests.support.long_cases import one_in
from tests.support.models import SUM, Spec, collection, exported
from tests.support.s3 import BUCKET, S3, s3_server
from tests.support.servers import running, scrape, tbe_serve

# Enough for two parts of an upload.
LARGE = (Spec("t", 300_000, 64, "SUM", ("x",)),)


@pytest.fixture
def url(s3: S3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A repository in the store that has nothing yet."""
    return f"{s3.new_prefix(monkeypatch, request)}/models"


def key_of(url: str, name: str) -> str:
    return f"{url.removeprefix(f's3://{BUCKET}/')}/{name}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def published(url: str, seed: int = 0, **options: Any) -> None:
    with staged(url, "m") as repository:
        export_model(collection(SUM, seed=seed), repository, "m", **options)


def pulled(url: str, repository: Path, *, follow: bool = False, **options: Any) -> list[tuple[str, int]]:
    return list(Mirror(Store(url), repository, pins={}, follow=follow, **options).pull())


def test_pushed_files_are_fetched_unchanged(url: str, s3: S3, signed_repository: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(signed_repository / "r", tmp_path / "r"))
    (repository / "m" / "warm_up.jsonl").write_text("{}\n")
    before = contents(repository / "m")
    said = tbe_export("push", str(repository / "m"), url).stdout
    assert said == f"published {url}/m/1\npublished {url}/m/2\n"
    # The claim of the number comes first; the manifest, with which the version is there, comes last.
    put = [key for method, key in s3.requests() if method == "PUT" and key.startswith(key_of(url, "m/2/"))]
    assert put[0] == key_of(url, "m/2/manifest.sha256")
    assert put[-1] == key_of(url, "m/2/manifest.json")
    assert tbe_export("push", str(repository / "m"), url).stdout == ""  # it has all of it
    assert [key for method, key in s3.requests() if method == "PUT"].count(put[-1]) == 1

    for version in (1, 2):
        assert Store(url).pull("m", version, tmp_path / "here")
        assert not Store(url).pull("m", version, tmp_path / "here")
    Store(url).pull_settings("m", tmp_path / "here")
    assert contents(tmp_path / "here" / "m") == before
    assert contents(repository / "m") == before
    assert {path.name for path in tmp_path.iterdir()} == {"r", "here", ".here.pulls"}
    assert [*contents(tmp_path / ".here.pulls")] == ["m/lock"]


def test_a_command_exports_to_a_store_and_another_brings_it(url: str, tmp_path: Path) -> None:
    export = ("model", *TRAINED, "--repository", url, "--name", "m")
    said = tbe_export(*export)
    assert said.exit_code == 0, said.stderr
    assert said.stdout.endswith(f"published {url}/m/1\nnext: tbe-serve run {url}\n")
    assert tbe_export(*export).stdout.count(f"published {url}/m/2\n") == 1
    changed = tbe_export(*export, "--output-dtype", "fp16")
    assert (changed.exit_code, "expected the schema of the versions already there" in changed.stderr) == (1, True)
    assert versions_in(Store(url).names()) == {"m": (1, 2)}

    brought = CliRunner().invoke(serve_app, ("pull", url, str(tmp_path / "r"), "--model", "m"))
    assert (brought.exit_code, brought.stdout) == (0, f"{tmp_path}/r/m/2\n")
    assert CliRunner().invoke(serve_app, ("pull", url, str(tmp_path / "r"), "--serve", "m=1")).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "r" / "m").iterdir()) == ["1", "2", "config.pbtxt"]
    verify_digests(open_bundle(tmp_path / "r" / "m" / "1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--continue-deltas",), "expected a folder with --only-hosts or --continue-deltas"),
        (("--only-hosts", "0", "--version", "1"), "expected a folder with --only-hosts or --continue-deltas"),
    ],
)
def test_an_export_that_needs_existing_files_refuses_a_url(
    url: str, arguments: tuple[str, ...], message: str
) -> None:
    said = tbe_export("model", *TRAINED, "--repository", url, "--name", "m", *arguments)
    assert (said.exit_code, message in said.stderr) == (1, True)


def test_hosts_come_before_their_router(url: str, s3: S3) -> None:
    config = ExportConfig(sharding=Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"}, hosts_as_models=True))
    with staged(url, "m") as repository:
        export_model(collection(SUM), repository, "m", config)
    assert versions_in(Store(url).names()) == {"m": (1,), "m-host-0": (1,), "m-host-1": (1,)}
    manifests = [key for method, key in s3.requests() if method == "PUT" and key.endswith("/manifest.json")]
    assert manifests[-3:] == [key_of(url, f"{model}/1/manifest.json") for model in ("m-host-0", "m-host-1", "m")]


def test_a_failed_export_publishes_nothing(url: str) -> None:
    def export() -> None:
        with staged(url, "m") as repository:
            export_model(collection(SUM), repository, "m")
            export_model(collection(SUM), repository, "-")

    with pytest.raises(ConfigurationError):
        export()
    assert Store(url).names() == {}


def test_python_does_not_make_a_folder_of_a_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="expected a folder, got a URL"):
        export_model(collection(SUM), url, "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("Of two publishers of one version number in a store, one succeeds")
def test_one_of_two_publishers_gets_the_number(url: str, tmp_path: Path) -> None:
    for number in range(2):
        export_model(collection(SUM, seed=number), tmp_path / str(number), "m")

    def one(number: int) -> str:
        try:
            return f"{number}: {list(push(tmp_path / str(number) / 'm', Store(url)))}"
        except PublishError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(one, range(2)))
    won = int(said[0][0])
    assert said[1].startswith(f"{url}/m/1: is taken by another bundle")
    Store(url).pull("m", 1, tmp_path / "here")
    assert contents(tmp_path / "here" / "m" / "1") == contents(tmp_path / str(won) / "m" / "1")


def test_a_claimed_version_number_is_not_reused(url: str, s3: S3) -> None:
    published(url)
    s3.put(key_of(url, "m/2/manifest.sha256"), b"of a publisher that was killed")
    published(url)
    assert versions_in(Store(url).names()) == {"m": (1, 3)}


def test_another_bundle_under_a_number_is_refused(url: str, tmp_path: Path) -> None:
    published(url)
    ours = exported(tmp_path)
    with pytest.raises(BundleError, match=re.escape(f"{ours}: expected the bundle of {url}, got another")):
        Store(url).pull("m", 1, tmp_path / "r")


@pytest.mark.promise("Versions in a store are compared with their digests before they are served")
def test_a_damaged_object_is_not_fetched(url: str, s3: S3, tmp_path: Path) -> None:
    published(url)
    key = key_of(url, "m/1/weights.0.bin")
    weights = s3.get(key)
    for damaged, message in (
        (bytes([weights[0] ^ 1]) + weights[1:], "expected SHA-256"),
        (weights[:-1], f"expected {len(weights)} bytes, got fewer"),
        (None, re.escape(f"{url}/m/1/weights.0.bin: is missing: publish the bundle again")),
    ):
        s3.delete(key) if damaged is None else s3.put(key, damaged)
        with pytest.raises(BundleError, match=message):
            Store(url).pull("m", 1, tmp_path / "r")
        assert not (tmp_path / "r" / "m" / "1").exists()
    s3.put(key, weights)
    for name, damaged in (("manifest.sha256", b"0" * 64), ("manifest.json", b"{")):
        right = s3.get(key_of(url, f"m/1/{name}"))
        s3.put(key_of(url, f"m/1/{name}"), damaged)
        with pytest.raises(BundleError, match=re.escape(f"{url}/m/1/manifest.json: ")):
            Store(url).pull("m", 1, tmp_path / "r")
        s3.put(key_of(url, f"m/1/{name}"), right)
    assert Store(url).pull("m", 1, tmp_path / "r")


def test_a_damaged_bundle_is_not_pushed(url: str, tmp_path: Path) -> None:
    bundle = exported(tmp_path)
    weights = (bundle / "weights.0.bin").read_bytes()
    (bundle / "weights.0.bin").write_bytes(bytes([weights[0] ^ 1]) + weights[1:])
    with pytest.raises(BundleError, match="expected SHA-256"):
        list(push(bundle.parent, Store(url)))
    assert versions_in(Store(url).names()) == {}


def test_settings_in_the_store_are_kept_unless_replaced(url: str, s3: S3, tmp_path: Path) -> None:
    list(push(exported(tmp_path, instances=2).parent, Store(url)))
    published(url)
    assert b"count: 2" in s3.get(key_of(url, "m/config.pbtxt"))
    assert tbe_serve("configure", str(tmp_path / "r" / "m"), "--instances", "3").returncode == 0
    assert tbe_export("push", str(tmp_path / "r" / "m"), url).stdout == ""
    assert b"count: 2" in s3.get(key_of(url, "m/config.pbtxt"))
    said = tbe_export("push", str(tmp_path / "r" / "m"), url, "--settings").stdout
    assert said == f"published {url}/m/config.pbtxt\n"
    assert b"count: 3" in s3.get(key_of(url, "m/config.pbtxt"))


def test_a_push_takes_no_release_back(url: str, s3: S3, tmp_path: Path) -> None:
    model = exported(tmp_path).parent
    export_model(collection(SUM, seed=1), tmp_path / "r", "m")
    assert tbe_export("release", str(model), "1").exit_code == 0
    pushed = [f"{url}/m/1", f"{url}/m/2", f"{url}/m.release.json"]
    assert list(push(model, Store(url))) == pushed
    assert tbe_export("release", f"{url}/m", "2").exit_code == 0
    newer = s3.get(key_of(url, "m.release.json"))
    assert list(push(model, Store(url))) == []
    assert s3.get(key_of(url, "m.release.json")) == newer
    assert tbe_export("release", str(model), "1").exit_code == 0
    assert list(push(model, Store(url))) == pushed[2:]


def test_unreadable_settings_are_not_fetched(url: str, s3: S3, tmp_path: Path) -> None:
    published(url)
    pulled(url, tmp_path / "here")
    before = contents(tmp_path / "here" / "m")
    s3.put(key_of(url, "m/config.pbtxt"), b"\xff{")
    with pytest.raises(ConfigurationError, match=re.escape(f"{url}/m/config.pbtxt: ")):
        pulled(url, tmp_path / "here")
    s3.delete(key_of(url, "m/config.pbtxt"))
    with pytest.raises(ConfigurationError, match=re.escape(f"{url}/m/config.pbtxt: is missing")):
        pulled(url, tmp_path / "here")
    assert contents(tmp_path / "here" / "m") == before


def test_objects_with_other_names_are_ignored(url: str, s3: S3, tmp_path: Path) -> None:
    published(url)
    for name in (
        "",
        "m/",
        "m/7/",
        "m/02/manifest.json",
        "m/0/manifest.json",
        "m/-1/manifest.json",
        f"m/{10**23}/manifest.json",
    ):
        s3.put(key_of(url, name), b"")
    for name in (
        ".hidden/1/manifest.json",
        "a b/1/manifest.json",
        "m/3/manifest.json/x",
        "m/\N{ARABIC-INDIC DIGIT FOUR}/manifest.json",
    ):
        s3.put(key_of(url, name), b"")
    assert pulled(url, tmp_path / "here") == [("m", 1)]
    s3.put(key_of(url, "m//x"), b"")
    with pytest.raises(ServerUnavailable, match=r"invalid path.*: remove that object"):
        pulled(url, tmp_path / "here")


def test_fetched_versions_are_served_without_the_store(
    url: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(url)
    common: Any = {"pins": {}, "follow": True, "every_s": None, "deltas": None}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ServerUnavailable):
        mirror_of(url, tmp_path / "here", **common)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.address)
    assert mirror_of(url, tmp_path / "here", **common) is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    mirror = mirror_of(url, tmp_path / "here", **common)
    assert mirror is not None
    assert "cannot be read or written" in str(mirror.problem)


def test_a_damaged_object_does_not_stop_fetched_versions(url: str, s3: S3, tmp_path: Path) -> None:
    published(url)
    assert tbe_export("release", f"{url}/m", "1").exit_code == 0
    key = key_of(url, "m/1/weights.0.bin")
    common: Any = {"pins": {}, "follow": True, "every_s": None, "deltas": None}
    weights = s3.get(key)
    s3.put(key, weights[:-1])
    with pytest.raises(BundleError, match="got fewer"):  # there is nothing to serve
        mirror_of(url, tmp_path / "here", **common)
    s3.put(key, weights)
    assert mirror_of(url, tmp_path / "here", **common) is not None
    published(url, 1)
    assert tbe_export("release", f"{url}/m", "2").exit_code == 0
    s3.put(key.replace("/1/", "/2/"), weights[:-1])
    mirror = mirror_of(url, tmp_path / "here", **common)
    assert mirror is not None
    assert "m/2/weights.0.bin: expected" in str(mirror.problem)
    assert release_says(tmp_path / "here" / "m") == (1,)
    with pytest.raises(BundleError, match="got fewer"):  # that very version is wanted
        mirror_of(url, tmp_path / "here", **common | {"pins": {"m": (2,)}})


def release_says(model: Path) -> tuple[int, ...]:
    release = read_release(model)
    assert release is not None
    return release.versions


def test_a_cache_folder_belongs_to_one_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store has not would be removed there: models of one's own, or of another store."""
    published(url)
    common: Any = {"pins": {}, "follow": False, "every_s": None, "deltas": None}
    repository = exported(tmp_path / "own").parent.parent
    before = contents(repository)
    with pytest.raises(
        ConfigurationError, match="got a folder with other content: files that the store lacks would be removed"
    ):
        mirror_of(url, repository, **common)
    assert contents(repository) == before
    assert mirror_of(f"{url}/", tmp_path / "cache", **common) is not None
    before = contents(tmp_path / "cache")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=re.escape(f"got a folder of {url}: files that the store lacks")):
        mirror_of(f"{url}/other", tmp_path / "cache", **common)
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize("command", ["prune", "verify", "compact", "configure"])
def test_commands_that_need_a_folder_refuse_a_url(command: str) -> None:
    run = tbe_serve if command == "configure" else tbe_export
    said = run(command, "s3://bucket/models/m", *(("--keep", "1") if command == "prune" else ()))
    assert "got the URL s3://bucket/models/m: `tbe-serve pull` fills a folder" in " ".join(said.stderr.split())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(collection(LARGE), tmp_path_factory.mktemp("large") / "r", "m")


@pytest.mark.promise("A killed push or pull leaves a whole version or none, and the next one resumes it")
@pytest.mark.parametrize(
    ("state", "asked_again"),
    one_in(2, [("whole parts", 2), ("a byte", 4), ("nothing right", 3), ("too much", 4)]),
)
def test_an_interrupted_pull_resumes(
    state: str, asked_again: int, large: Path, url: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(push(large.parent, Store(url)))
    monkeypatch.setattr("serving.store._PART_BYTES", part := 5 << 20)
    weights = (large / "weights.0.bin").read_bytes()
    assert len(weights) // part == 3
    draft = tmp_path / ".here.pulls" / "m" / f"1-{open_bundle(large).digest[:16]}"
    draft.mkdir(parents=True)
    (draft / ".manifest.json.abcdefgh").write_bytes(b"of a pull that was killed while it wrote the last file")
    (draft.parent / "1-of another manifest").mkdir()
    begun = {
        "whole parts": weights[: 2 * part],
        "a byte": weights[:1],
        "nothing right": bytes(3 * part),
        "too much": weights + b".",
    }
    (draft / "weights.0.bin").write_bytes(begun[state])
    before = len(s3.requests())
    assert Store(url).pull("m", 1, tmp_path / "here")
    assert contents(tmp_path / "here" / "m" / "1") == contents(large)
    assert [path.name for path in draft.parent.iterdir()] == ["lock"]
    assert (
        s3.requests()[before:].count(("GET", key_of(url, "m/1/weights.0.bin")))
        == asked_again + (state == "nothing right") * 2
    )


ONE = """
import sys
from pathlib import Path
from export.publish.push import push
from serving.store import Store, versions_in
way, model, url, here = sys.argv[1:]
print("ready", flush=True)
if way == "push":
    list(push(Path(model), Store(url)))
else:
    Store(url).pull("m", 1, Path(here))
"""


@pytest.mark.promise("A killed push or pull leaves a whole version or none, and the next one resumes it")
@pytest.mark.parametrize("way", ["push", "pull"])
def test_a_killed_push_or_pull_leaves_a_whole_version_or_none(
    way: str, large: Path, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    if way == "pull":
        list(push(large.parent, Store(url)))

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", ONE, way, str(large.parent), url, str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    moments, whole = random.Random(way), 0
    for _ in range(4):
        with start() as process:
            time.sleep(moments.uniform(0, 0.4))
            process.kill()
        if way == "push" and versions_in(Store(url).names()):
            Store(url).pull("m", 1, tmp_path / "seen")
            whole += 1
        if way == "pull" and (folder / "m" / "1").exists():
            assert contents(folder / "m" / "1") == contents(large)
            whole += 1
    with start() as process:
        assert process.wait() == 0
    Store(url).pull("m", 1, folder)
    assert contents(folder / "m" / "1") == contents(large)


def test_concurrent_pulls_of_a_version_fetch_it_once(large: Path, url: str, s3: S3, tmp_path: Path) -> None:
    list(push(large.parent, Store(url)))
    before = len(s3.requests())
    with ThreadPoolExecutor(4) as pool:
        brought = list(pool.map(lambda _: Store(url).pull("m", 1, tmp_path / "here"), range(4)))
    assert sorted(brought) == [False, False, False, True]
    assert s3.requests()[before:].count(("GET", key_of(url, "m/1/program.pt"))) == 1


def test_an_exact_pull_removes_versions_missing_in_the_store(url: str, s3: S3, tmp_path: Path) -> None:
    for seed in range(2):
        published(url, seed)
    folder = tmp_path / "here"
    assert pulled(url, folder, is_exact=True) == [("m", 2)]
    published(url, 2)
    s3.delete(key_of(url, "m/2/manifest.json"))
    with_hold = hold(folder / "m" / "2")
    try:
        assert pulled(url, folder, is_exact=True) == [("m", 3)]
        assert (folder / "m" / "2").exists()  # a server has it open
        s3.delete(key_of(url, "m/3/manifest.json"))
        lock = hold(folder / "m" / "3")
        try:
            with pytest.raises(ConfigurationError, match="no longer has version 3, which a server has open"):
                pulled(url, folder, is_exact=True)
        finally:
            os.close(lock)
    finally:
        os.close(with_hold)
    assert pulled(url, folder, is_exact=True) == []
    assert sorted(path.name for path in (folder / "m").iterdir()) == ["1", "config.pbtxt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.0.bin", b"", "weights.0.bin: expected "),
        ("weights.0.bin", None, "weights.0.bin: expected SHA-256"),
        ("model.py", b"pass", "model.py: expected 167 bytes, got 4"),
        ("manifest.json", b"{}", "manifest.json: "),
    ],
)
def test_damaged_versions_in_a_store_are_not_released(
    url: str, s3: S3, name: str, content: bytes | None, message: str
) -> None:
    """`content` is what the object holds; None: as many bytes as before, one of them changed."""
    for seed in range(2):
        published(url, seed)
    assert tbe_export("release", f"{url}/m", "1").exit_code == 0
    key = key_of(url, f"m/2/{name}")
    changed = bytearray(s3.get(key))
    changed[len(changed) // 2] ^= 1
    s3.put(key, bytes(changed) if content is None else content)
    refused = tbe_export("release", f"{url}/m", "2")
    assert refused.exit_code == 1
    assert f"{url}/m/2/{message}" in refused.stderr
    assert tbe_export("release", f"{url}/m", "2", "--no-verify").exit_code == 0


def test_a_release_decides_which_versions_are_fetched(url: str, tmp_path: Path) -> None:
    for seed in range(3):
        published(url, seed)
    assert tbe_export("release", f"{url}/m", "2").stdout == f"{url}/m.release.json: version 2\n"
    refused = tbe_export("release", f"{url}/m", "4")
    assert (refused.exit_code, "expected one of versions [3, 2, 1], got 4" in refused.stderr) == (1, True)
    assert pulled(url, tmp_path / "a", follow=True) == [("m", 2)]
    assert json.loads((tmp_path / "a" / "m.release.json").read_text())["versions"] == [2]
    assert pulled(url, tmp_path / "b") == [("m", 3)]


def test_an_invalid_or_silent_store_is_reported(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        "s3://",
        "http://host/models",
        "nothing://b/models",
        "s3:/b/models",
        "file://",
        "file://here",
        "s3:///b",
    ):
        with pytest.raises(ConfigurationError, match="expected a repository in a store, such as s3://bucket/models"):
            Store(wrong)
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Store("s3://[b/models")
    with pytest.raises(
        ServerUnavailable,
        match=r"no-such-bucket/models/: cannot be read or written: .*404 Not Found: is there a bucket of that name",
    ):
        versions_in(Store("s3://no-such-bucket/models").names())
    with pytest.raises(ConfigurationError, match=r"expected models made by tbe-export, found none$"):
        pulled(url, tmp_path)
    published(url)
    with pytest.raises(ConfigurationError, match="found none: is it a model's"):
        pulled(f"{url}/m", tmp_path)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(ServerUnavailable, match="AWS_ALLOW_HTTP=true allows that"):
        versions_in(Store(url).names())


def test_a_folder_can_be_a_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Store(f"file://{tmp_path}/store")
    (tmp_path / "store").mkdir()
    published(f"file://{tmp_path}/store")
    assert pulled(f"file://{tmp_path}/store", tmp_path / "here") == [("m", 1)]
    verify_digests(open_bundle(tmp_path / "here" / "m" / "1"))


@pytest.mark.promise("A server that follows a store continues when the store is unreachable")
def test_a_server_follows_a_store_and_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, cache = f"s3://{BUCKET}/models", tmp_path / "cache" / "repository"
    bags = {"x": [[1, 2], [3]]}
    with s3_server(tmp_path) as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        published(url, 0)
        assert tbe_export("release", f"{url}/m", "1").exit_code == 0
        options = (
            "--cache",
            str(cache),
            "--follow",
            "--unload-after-s",
            "0",
            "--every-s",
            "0.3",
            "--log-format",
            "json",
        )
        with running(url, *options) as server, LookupClient(server.grpc, "m", PATIENT_S) as client:

            def answers() -> Any:
                return client.lookup(bags)["x"].tolist()

            first = Engine.open(cache / "m" / "1").lookup(bags)["x"].tolist()
            assert answers() == first
            published(url, 1)
            assert answers() == first
            assert tbe_export("release", f"{url}/m", "2").exit_code == 0
            until(lambda: (cache / "m" / "2").exists(), "the new version is brought")
            second = Engine.open(cache / "m" / "2").lookup(bags)["x"].tolist()
            assert second != first
            until(lambda: answers() == second, "the new version is served")  # no call fails meanwhile
            s3.delete("models/m/1/manifest.json")
            until(lambda: not (cache / "m" / "1").exists(), "what the store has no longer is removed")
            s3.process.terminate()
            assert server.process.stderr is not None
            events: dict[str, Any] = {}
            while "pull_failed" not in events:
                line = json.loads(server.process.stderr.readline())
                events[line.get("event", "")] = line
            assert (events["pulled"]["model"], events["pulled"]["version"]) == ("m", 2)
            assert "cannot be read or written" in events["pull_failed"]["message"]
            assert [
                line.partition(" ")[0] for line in scrape(server).splitlines() if "tbe_store_read" in line[:15]
            ] == [f'tbe_store_read_timestamp_seconds{{store="{url}"}}']
            assert answers() == second


def test_a_folder_given_a_cache_is_refused(one_model: Path) -> None:
    for option in (("--cache", "c"), ("--every-s", "1")):
        said = tbe_serve("run", str(one_model), *option)
        assert (said.returncode, "require the URL of a repository" in said.stderr) == (1, True)
