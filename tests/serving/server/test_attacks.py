"""Whoever can write into a repository, but has no trusted key, is refused by name."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export import export_model
from serving.errors import ServingError
from tests.support.attackers import (
    CHANGED_CONFIG,
    EXACT,
    VERSION_FILES,
    Attack,
    Target,
    change,
    expected_files,
    flip,
    served_files,
    to_config,
    unsigned_version,
    warm_up,
)
from tests.support.models import SUM, collection
from tests.support.special_files import KINDS, put


def unverified(target: Target) -> None:
    change(target.model / "config.pbtxt", 'string_value: "true"', 'string_value: "false"')


def to_backend(name: str) -> Attack:
    return lambda target: change(target.model / "config.pbtxt", 'backend: "python"', f'backend: "{name}"')


def other_file(target: Target) -> None:
    change(target.model / "config.pbtxt", '"model.py"', '"theirs.py"')
    (target.newest / "theirs.py").write_text(target.code)


def ensemble(target: Target) -> None:
    change(target.model / "config.pbtxt", 'backend: "python"', 'platform: "ensemble"')


def signed_by_another(target: Target) -> None:
    statement = b'tbe-serving/1 config.pbtxt "m"\n' + (target.model / "config.pbtxt").read_bytes()
    (target.model / "config.sig").write_bytes(Ed25519PrivateKey.generate().sign(statement))


def other_s(*names: str) -> Attack:
    def attack(target: Target) -> None:
        for name in names:
            shutil.copy(target.repository / "other" / name, target.model / name)

    return attack


def version_from(source: str) -> Attack:
    return lambda target: shutil.copytree(target.repository / source, target.model / "3")


def linked_version(target: Target) -> None:
    (target.model / "3").symlink_to("1")


def linked(name: str) -> Attack:
    """The same content, through a link that may lead elsewhere a moment later."""

    def attack(target: Target) -> None:
        path = target.model / name
        path.rename(target.repository.parent / "elsewhere")
        path.symlink_to(target.repository.parent / "elsewhere")

    return attack


def unsigned_model(target: Target) -> None:
    export_model(collection(SUM, seed=9), target.repository, "theirs", EXACT)


def edited_manifest(target: Target) -> None:
    manifest = json.loads((target.newest / "manifest.json").read_text())
    manifest["tables"][0]["pooling"] = "MEAN"
    (target.newest / "manifest.json").write_text(json.dumps(manifest))


def digest_of_theirs(target: Target) -> None:
    (target.newest / "model.py").write_text(target.code)
    manifest = json.loads((target.newest / "manifest.json").read_text())
    digest = hashlib.sha256(target.code.encode()).hexdigest()
    manifest["files"]["model.py"] = {"size_bytes": len(target.code), "sha256": digest}
    (target.newest / "manifest.json").write_text(json.dumps(manifest))


def resized(name: str, change_of: Callable[[bytes], bytes]) -> Attack:
    return lambda target: (target.newest / name).write_bytes(change_of((target.newest / name).read_bytes()))


NOT_VERSION_3 = r"m/3/manifest\.sig: expected a signature .* of model 'm', version 3, got another"

REFUSED = [
    pytest.param(to_config("version_policy { all {} }\n"), CHANGED_CONFIG, id="other versions"),
    pytest.param(
        to_config('model_repository_agents { agents { name: "theirs" } }\n'), CHANGED_CONFIG, id="a repository agent"
    ),
    pytest.param(
        to_config('parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/tmp/theirs.tar.gz" } }\n'),
        CHANGED_CONFIG,
        id="another Python",
    ),
    pytest.param(to_config('model_warmup { name: "w" }\n'), CHANGED_CONFIG, id="a warm-up of Triton's"),
    pytest.param(
        to_config('cc_model_filenames { key: "7.0" value: "x" }\n'), CHANGED_CONFIG, id="files by capability"
    ),
    pytest.param(unverified, CHANGED_CONFIG, id="verify_weights off"),
    pytest.param(to_backend("identity"), CHANGED_CONFIG, id="backend identity"),
    pytest.param(to_backend("theirs"), CHANGED_CONFIG, id="a backend of theirs"),
    pytest.param(ensemble, CHANGED_CONFIG, id="an ensemble"),
    pytest.param(other_file, CHANGED_CONFIG, id="another model.py"),
    pytest.param(signed_by_another, CHANGED_CONFIG, id="settings signed by another"),
    pytest.param(other_s("config.sig"), CHANGED_CONFIG, id="config.sig of another model"),
    pytest.param(other_s("config.pbtxt", "config.sig"), CHANGED_CONFIG, id="settings of another model"),
    pytest.param(
        lambda t: (t.model / "config.sig").unlink(),
        r"m/config\.sig: cannot be read: No such file.*sign it: `tbe-serve configure --signing-key`",
        id="settings not signed",
    ),
    pytest.param(version_from("other/1"), NOT_VERSION_3, id="another model's bundle"),
    pytest.param(version_from("m/1"), NOT_VERSION_3, id="an older version as a newer"),
    pytest.param(linked_version, NOT_VERSION_3, id="a link to an older version"),
    pytest.param(unsigned_version, r"m/3/manifest\.sig: cannot be read: .*export with --signing-key", id="unsigned"),
    pytest.param(unsigned_model, r"theirs/config\.sig: cannot be read", id="a model of theirs"),
    pytest.param(edited_manifest, r"m/2/manifest\.sig: expected a signature", id="an edited manifest"),
    pytest.param(digest_of_theirs, r"m/2/manifest\.sig: expected a signature", id="the digest of their model.py"),
    pytest.param(lambda t: flip(t.newest / "weights.0.bin"), r"weights\.0\.bin: expected SHA-256", id="weights"),
    pytest.param(lambda t: flip(t.newest / "program.pt"), r"program\.pt: expected SHA-256", id="the program"),
    pytest.param(
        resized("weights.0.bin", lambda b: b[:-1]), r"weights\.0\.bin: expected \d+ bytes", id="cut weights"
    ),
    pytest.param(resized("weights.0.bin", lambda b: b + b"\0"), r"weights\.0\.bin: expected", id="longer weights"),
    pytest.param(warm_up, r"warm_up\.sig: cannot be read", id="requests to answer first"),
    *(
        pytest.param(
            linked(name), rf"{Path(name).name}: cannot be read: expected a file, got a symbolic link", id=name
        )
        for name in (
            "config.pbtxt",
            "config.sig",
            *(f"2/{file_name}" for file_name in sorted(VERSION_FILES - {"model.py"})),
        )
    ),
]


@pytest.mark.promise("Each change to a signed bundle or its settings is refused by name")
@pytest.mark.parametrize(("attack", "message"), REFUSED)
def test_each_attack_on_a_signed_repository_is_refused_by_name(target: Target, attack: Attack, message: str) -> None:
    attack(target)
    with pytest.raises(ServingError, match=message) as refused:
        served_files(target)
    assert "\n" not in str(refused.value)


@pytest.mark.promise("A pipe, device, socket, link or endless file in place of a file is refused without waiting")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "name",
    ["config.pbtxt", "config.sig", "warm_up.jsonl", *(f"2/{file_name}" for file_name in sorted(VERSION_FILES))],
)
def test_special_files_are_refused_without_waiting(target: Target, name: str, kind: Callable[[Path], None]) -> None:
    path = put(target.model / name, kind)
    if name == "2/model.py":  # which is ours, whatever lies there
        assert served_files(target).keys() == expected_files()
        return
    with pytest.raises(ServingError, match=rf"{path.name}: (cannot be read|expected \d+ bytes)"):
        served_files(target)
