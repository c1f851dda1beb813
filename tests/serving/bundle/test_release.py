"""A release says which versions are to be served; OpenSSL verifies the same signature."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.bundle.release import Release, read_release, release_path
from serving.bundle.signature import TrustedKeys
from serving.errors import BundleError
from tests.support.attackers import Target, change, flip
from tests.support.commands import tbe_export


def release(target: Target, *versions: str, key: bool = True) -> str:
    signed = ("--signing-key", str(target.key)) if key else ()
    done = tbe_export("release", str(target.model), *versions, *signed)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def test_a_release_is_written_beside_the_model_and_replaced(target: Target) -> None:
    assert read_release(target.model) is None
    assert release(target, "2", "1", "2") == f"{target.repository}/m.release.json: version 2, 1\n"
    first = read_release(target.model, TrustedKeys.read(target.trusted))
    release(target, "1")
    second = read_release(target.model, TrustedKeys.read(target.trusted))
    assert first is not None
    assert second is not None
    assert (first.versions, second.versions) == ((2, 1), (1,))
    assert second.sequence > first.sequence
    later = Release(versions=(1,), sequence=second.sequence + 10**9)  # the clock was put back since
    release_path(target.model).write_text(f'{{"versions": [1], "sequence": {later.sequence}}}')
    assert "the last release was signed" in release(target, "1", key=False)
    assert read_release(target.model) == Release(versions=(1,), sequence=later.sequence + 1)
    assert sorted(path.name for path in target.repository.iterdir()) == [
        "m",
        "m.release.json",
        "m.release.sig",
        "other",
    ]


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("m", "3", "m: expected one of versions [2, 1], got 3"),
        ("n", "1", "n/config.pbtxt: cannot be read: No such file or directory"),
    ],
)
def test_unpublished_versions_are_not_released(target: Target, name: str, version: str, message: str) -> None:
    done = tbe_export("release", str(target.repository / name), version)
    assert done.exit_code == 1
    assert message in done.stderr
    assert read_release(target.model) is None


@pytest.mark.parametrize("name", ["weights.0.bin", "program.pt", "manifest.json"])
def test_damaged_versions_are_not_released(target: Target, name: str) -> None:
    release(target, "1")
    flip(target.model / "2" / name)
    done = tbe_export("release", str(target.model), "1", "2")
    assert done.exit_code == 1
    assert f"{target.model}/2/{name}: " in done.stderr
    published = read_release(target.model)
    assert published is not None
    assert published.versions == (1,)
    assert tbe_export("release", str(target.model), "2", "--no-verify").exit_code == 0


def test_openssl_verifies_a_release(target: Target, tmp_path: Path) -> None:
    release(target, "1")
    path = release_path(target.model)
    statement = tmp_path / "statement"
    statement.write_bytes(b'tbe-serving/1 m.release.json "m"\n' + path.read_bytes())
    arguments = ("-pubin", "-inkey", target.trusted, "-in", statement, "-sigfile", path.with_suffix(".sig"))
    subprocess.run(["openssl", "pkeyutl", "-verify", "-rawin", *arguments], check=True)


def unsigned(target: Target) -> None:
    release_path(target.model).with_suffix(".sig").unlink()


def changed(target: Target) -> None:
    change(release_path(target.model), '"versions":[2]', '"versions":[1]')


def by_somebody_else(target: Target) -> None:
    flip(release_path(target.model).with_suffix(".sig"))


def of_another_model(target: Target) -> None:
    tbe_export("release", str(target.repository / "other"), "1", "--signing-key", str(target.key))
    for suffix in (".json", ".sig"):
        other = release_path(target.repository / "other").with_suffix(suffix)
        shutil.copy(other, release_path(target.model).with_suffix(suffix))


@pytest.mark.promise("A release without a trusted signature is refused")
@pytest.mark.parametrize("spoil", [unsigned, changed, by_somebody_else, of_another_model])
def test_a_release_that_no_trusted_key_signed_is_refused(target: Target, spoil: Callable[[Target], None]) -> None:
    release(target, "2")
    spoil(target)
    with pytest.raises(BundleError, match=r"m\.release\.sig: .*sign it.*: `tbe-export release --signing-key`"):
        read_release(target.model, TrustedKeys.read(target.trusted))


@pytest.mark.parametrize(
    "content",
    ["", "7", "{}", '{"versions":[],"sequence":1}', '{"versions":[0],"sequence":1}', '{"versions":["7"],"sequence":1}',
     '{"versions":[7],"sequence":1,"more":1}', '{"versions":[7]}'],
)  # fmt: skip
def test_invalid_release_files_are_refused(tmp_path: Path, content: str) -> None:
    release_path(tmp_path / "m").write_text(content)
    with pytest.raises(BundleError, match=r"m\.release\.json: expected what `tbe-export release` writes"):
        read_release(tmp_path / "m")


def test_a_released_version_is_not_pruned(target: Target) -> None:
    release(target, "1")
    done = tbe_export("prune", str(target.model), "--keep", "1", "--dry-run")
    assert done.stdout.splitlines() == [
        f"{target.model}/2: among the newest 1",
        f"{target.model}/1: its release says to serve it",
    ]
