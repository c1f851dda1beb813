"""Whoever can write into a repository, but has no trusted key, gets no code run and no number served.

What is expected is worked out here, from the layout that docs/security.md promises, by OpenSSL's keys and numpy's numbers.
"""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner, Result

from export import ExportConfig, WeightDtype, export_model
from serving.__main__ import app
from serving.bundle import in_use
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import ServingError
from serving.server import find_models, run_server
from serving.server.private import Trust, private_folder
from tests.models import SUM, collection, float_tables
from tests.no_files import KINDS, put
from tests.served.tools import FREE, FREE_PORTS, Running, running, stubs, tbe_serve, wait_for_answer

EXACT = ExportConfig(dtype={"*": WeightDtype.FP32})
VERSION_FILES = {"manifest.json", "manifest.sig", "model.py", "program.pt", "weights.0.bin"}


@dataclass(frozen=True)
class Target:
    """A repository that somebody may write to: `m` in versions 1 and 2, and `other` in version 1, all signed.

    Attributes:
        mark: a file that is there once code of the attacker ran.
    """

    repository: Path
    trusted: Path
    key: Path
    mark: Path

    @property
    def model(self) -> Path:
        return self.repository / "m"

    @property
    def newest(self) -> Path:
        return self.model / "2"

    @property
    def code(self) -> str:
        return f"open({str(self.mark)!r}, 'a').write(__file__ + chr(10))\n"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem, trusted.pem and the repository r."""
    folder = tmp_path_factory.mktemp("signed")
    key = folder / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", folder / "trusted.pem"], check=True)
    for model, seed in (("m", 1), ("m", 2), ("other", 3)):
        export_model(collection(SUM, seed=seed), folder / "r", model, EXACT, signing_key=key)
    return folder


@pytest.fixture
def target(published: Path, tmp_path: Path) -> Iterator[Target]:
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    mark = tmp_path / "somebody else's code ran"
    yield Target(tmp_path / "r", tmp_path / "trusted.pem", tmp_path / "key.pem", mark)
    assert not mark.exists(), mark.read_text()


def row_of(seed: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """What the version made of this seed answers for the id 7 of `x`."""
    return float_tables(collection(SUM, seed=seed))["a"][[7]]


def answers(url: str, seed: int) -> int:
    """The version that answers, with the numbers of the collection of this seed."""
    with LookupClient(url, "m", 60) as client:
        answer = client.lookup({"x": [[7]]})
    np.testing.assert_array_equal(answer["x"], row_of(seed))
    return answer.version


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def add(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def served_files(target: Target, **options: object) -> dict[str, bytes]:
    """What Triton would be given: paths and contents."""
    trust = Trust(keys=target.trusted, folder=target.repository.parent, **options)  # type: ignore[arg-type]
    with private_folder(target.repository, find_models(target.repository), trust) as private:
        assert stat.S_IMODE(Path(private.path).stat().st_mode) == 0o700
        return {
            str(path.relative_to(private.repository)): path.read_bytes()
            for path in private.repository.rglob("*")
            if not path.is_dir()
        }


def expected_files(version: int = 2) -> set[str]:
    return {
        "m/config.pbtxt", *(f"m/{version}/{name}" for name in VERSION_FILES),
        "other/config.pbtxt", *(f"other/1/{name}" for name in VERSION_FILES),
    }  # fmt: skip


# --- what is refused

Attack = Callable[[Target], object]


def to_config(text: str) -> Attack:
    return lambda target: add(target.model / "config.pbtxt", text)


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


def unsigned_version(target: Target) -> None:
    bundle = export_model(collection(SUM, seed=9), target.repository, "m", EXACT)
    (bundle / "model.py").write_text(target.code)


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


def warm_up(target: Target) -> None:
    (target.model / "warm_up.jsonl").write_text('{"at": "", "why": "", "values": [7], "lengths": [1, 0, 0]}\n')


def resized(name: str, change_of: Callable[[bytes], bytes]) -> Attack:
    return lambda target: (target.newest / name).write_bytes(change_of((target.newest / name).read_bytes()))


CHANGED_CONFIG = r"config\.sig: expected a signature by a key of .* over config\.pbtxt of model 'm', got another"
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
        for name in ("config.pbtxt", "config.sig", *(f"2/{each}" for each in sorted(VERSION_FILES - {"model.py"})))
    ),
]


@pytest.mark.parametrize(("attack", "message"), REFUSED)
def test_it_is_refused_by_name(target: Target, attack: Attack, message: str) -> None:
    attack(target)
    with pytest.raises(ServingError, match=message) as refused:
        served_files(target)
    assert "\n" not in str(refused.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "name", ["config.pbtxt", "config.sig", "warm_up.jsonl", *(f"2/{each}" for each in sorted(VERSION_FILES))]
)
def test_nothing_in_place_of_a_file_is_waited_for(target: Target, name: str, kind: Callable[[Path], None]) -> None:
    path = put(target.model / name, kind)
    if name == "2/model.py":  # which is ours, whatever lies there
        assert served_files(target).keys() == expected_files()
        return
    with pytest.raises(ServingError, match=rf"{path.name}: (cannot be read|expected \d+ bytes)"):
        served_files(target)


# --- what is left out


MODULES = ("json", "serving", "numpy", "torch", "triton_python_backend_utils", "sitecustomize", "usercustomize", "1")


def add_code(target: Target, folder: Path) -> None:
    """In every form in which Python or Triton might take it."""
    for name in MODULES:
        if not (folder / name).exists():
            (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(target.code)
        (folder / f"{name}.py").write_text(target.code)
        (folder / f"{name}.so").write_bytes(b"\x7fELF")
    cache = folder / "__pycache__"
    cache.mkdir(exist_ok=True)
    source = folder / "theirs.py"
    source.write_text(target.code)
    code = f"import py_compile; py_compile.compile({str(source)!r}, {str(cache / 'model.cpython-311.pyc')!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    shutil.copy(cache / "model.cpython-311.pyc", folder / "model.pyc")
    for name in ("triton_python_backend_stub", "python3"):
        (folder / name).write_text(f"#!/bin/sh\necho stub >> '{target.mark}'\n")
        (folder / name).chmod(0o755)
    for name in ("libtriton_python.so", "libtorch.so", "theirs.pth"):
        (folder / name).write_bytes(b"\x7fELF")


def test_what_is_not_expected_is_left_out(target: Target) -> None:
    for folder in (target.newest, target.model, target.model / "1", target.repository):
        add_code(target, folder)
    (target.newest / "model.py").write_text(target.code)
    found = served_files(target)
    assert found.keys() == expected_files()
    assert b"from serving.backend import TritonPythonModel" in found["m/2/model.py"]


def test_with_code_everywhere_a_server_runs_none_of_it(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model, in the working directory and on PYTHONPATH; and where it is loaded anew."""
    for folder in (target.newest, target.model, target.repository):
        add_code(target, folder)
    (target.newest / "model.py").write_text(target.code)
    monkeypatch.chdir(target.repository)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target.repository), "", str(target.model)]))
    with run_server(
        Path(), FREE, models=["m"], trust=Trust(keys=target.trusted), log=target.repository.parent / "log"
    ) as server:
        assert answers(server.grpc, seed=2) == 2


def test_an_older_version_is_served_only_above_the_floor(target: Target) -> None:
    """Nothing can be told from a signature about what was published since."""
    shutil.rmtree(target.newest)
    assert served_files(target).keys() == expected_files(1)
    assert served_files(target, min_versions={"m": 1, "": 1}).keys() == expected_files(1)
    for floors in ({"m": 2}, {"": 2}, {"": 1, "m": 3}):
        with pytest.raises(ServingError, match=r"m: expected version \d or newer, as --min-version says, got 1"):
            served_files(target, min_versions=floors)


def test_what_is_copied_is_what_was_compared(target: Target) -> None:
    """Whoever changes a file meanwhile gets it refused, or not served."""
    path = target.newest / "weights.0.bin"
    right, wrong = path.read_bytes(), bytes(path.stat().st_size)
    done = threading.Event()

    def rewrite() -> None:
        while not done.is_set():
            for content in (wrong, right):
                with suppress(OSError), path.open("r+b") as file:
                    file.write(content)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(30):
            with suppress(ServingError):
                assert served_files(target)["m/2/weights.0.bin"] == right
    finally:
        done.set()
        thread.join()


def test_nothing_of_the_repository_is_searched_for_modules(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 2.51's own Python passes over PYTHONPATH; another's may not."""
    linked, mine = target.repository.parent / "linked", target.repository.parent / "mine"
    linked.symlink_to(target.model)
    monkeypatch.chdir(target.repository)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target.repository), "", "m", str(linked), str(mine)]))
    with private_folder(Path(), ["m"], Trust(keys=target.trusted)) as private:
        assert private.environment["PYTHONPATH"] == str(mine)


def test_a_copy_is_no_link(target: Target) -> None:
    trust = Trust(keys=target.trusted, folder=target.repository.parent)
    with private_folder(target.repository, ["m"], trust) as private:
        inodes = {path.stat().st_ino for path in private.repository.rglob("*")}
        assert not inodes & {path.stat().st_ino for path in target.repository.rglob("*")}
        content = (private.repository / "m" / "2" / "weights.0.bin").read_bytes()
        (target.newest / "weights.0.bin").write_bytes(bytes(len(content)))
        assert (private.repository / "m" / "2" / "weights.0.bin").read_bytes() == content
        assert not any(path.is_symlink() for path in private.repository.rglob("*"))
    assert not Path(private.path).exists()


def test_weights_in_place_are_compared_and_nothing_else_is_linked(target: Target) -> None:
    trust = Trust(keys=target.trusted, weights_in_place=True)
    with private_folder(target.repository, ["m"], trust) as private:
        linked = [path for path in private.repository.rglob("*") if path.is_symlink()]
        assert linked == [private.repository / "m" / "2" / "weights.0.bin"]
        assert linked[0].readlink() == target.newest / "weights.0.bin"
        engine = Engine.open(private.repository / "m" / "2")
        with in_use(target.newest) as used, in_use(target.model / "1") as unused:
            assert (used, unused) == (True, False)  # tbe-export prune leaves it
        np.testing.assert_array_equal(engine.lookup({"x": [[7]]})["x"], row_of(2))
    flip(target.newest / "weights.0.bin")
    with (
        pytest.raises(ServingError, match=r"weights\.0\.bin: expected SHA-256"),
        private_folder(target.repository, ["m"], trust),
    ):
        pass


def test_what_a_killed_server_left_is_removed(target: Target, tmp_path: Path) -> None:
    """The next one that makes a private folder there does it."""
    folder = tmp_path / "private"
    folder.mkdir()
    code = (
        "import os; from pathlib import Path; from serving.server.private import Trust, private_folder\n"
        f"trust = Trust(keys=Path({str(target.trusted)!r}), folder=Path({str(folder)!r}))\n"
        f"with private_folder(Path({str(target.repository)!r}), ['m'], trust): os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (left,) = folder.iterdir()
    with private_folder(target.repository, ["m"], Trust(keys=target.trusted, folder=folder)) as private:
        assert [str(path) for path in folder.iterdir()] == [private.path]
        assert not left.exists()
        # One that is in use stays.
        with private_folder(target.repository, ["m"], Trust(keys=target.trusted, folder=folder)):
            assert Path(private.path).exists()
    assert list(folder.iterdir()) == []


def test_a_private_folder_in_the_repository_is_refused(target: Target) -> None:
    with (
        pytest.raises(ServingError, match="expected a folder outside the repository"),
        private_folder(target.repository, ["m"], Trust(keys=target.trusted, folder=target.model)),
    ):
        pass


# --- a server that runs


def command(*arguments: str | Path) -> Result:
    """A command, in this process."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def load(server: Running, *more: str) -> Result:
    return command("load", "m", "--url", server.grpc, *more)


def test_a_server_whose_repository_is_changed_recovers_what_was_signed(target: Target) -> None:
    with running(target.repository, "--trusted-keys", str(target.trusted)) as server:
        add_code(target, target.newest)
        (target.newest / "model.py").write_text(target.code)
        flip(target.newest / "weights.0.bin")
        to_config("version_policy { all {} }\n")(target)
        for stub in stubs(server.triton, "m"):
            stub.kill()
        with LookupClient(server.grpc, "m", 1) as client:
            wait_for_answer(client)
        assert answers(server.grpc, seed=2) == 2
        refused = load(server)
        assert (refused.exit_code, refused.stdout) == (1, "m: still serves version 2\n")
        assert "config.sig: expected a signature" in refused.stderr


def test_a_running_server_loads_what_is_signed_alone(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    options = ("--trusted-keys", str(target.trusted), "--private-folder", str(folder), "--min-version", "m=2")
    with running(target.repository, *options) as server:
        unsigned_version(target)
        refused = load(server)
        assert (refused.exit_code, refused.stdout) == (1, "m: still serves version 2\n")
        assert "m/3/manifest.sig: cannot be read" in refused.stderr
        assert "or newer, as --min-version says, got 1" in load(server, "--version", "1").stderr
        signed = command("configure", target.model, "--instances", "2", "--signing-key", target.key)
        assert signed.exit_code == 0, signed.output
        export_model(collection(SUM, seed=4), target.repository, "m", EXACT, signing_key=target.key)
        assert load(server).stdout == "m: version 2 → 4\n"
        assert answers(server.grpc, seed=4) == 4
        wait_for_stubs(server.triton, 2)
        # Version 2 is not what it was, in the repository; what is served is ours.
        flip(target.newest / "weights.0.bin")
        assert load(server, "--version", "2").stdout == "m: version 4 → 2\n"
        assert answers(server.grpc, seed=2) == 2
        assert load(server).stdout == "m: version 2 → 4\n"
    assert list(folder.iterdir()) == []


def wait_for_stubs(server: psutil.Process, count: int) -> None:
    """Until this many processes answer for `m`: those of a version that was served before may not have ended."""
    deadline = time.monotonic() + 60
    while len(stubs(server, "m")) != count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_command_refuses_before_tritonserver_starts(target: Target) -> None:
    unsigned_version(target)
    done = tbe_serve("run", str(target.repository), *FREE_PORTS, "--trusted-keys", str(target.trusted))
    assert done.returncode == 1
    assert "m/3/manifest.sig: cannot be read: No such file or directory: only what a key of" in done.stderr


def test_a_signed_warm_up_and_a_signed_version_are_taken(target: Target) -> None:
    warm_up(target)
    signed = command("configure", target.model, "--version", "1", "--signing-key", target.key)
    assert signed.exit_code == 0, signed.output
    assert served_files(target).keys() == expected_files(1) | {"m/warm_up.jsonl"}
    changed = command("configure", target.model, "--version", "2").stdout
    assert "it was signed: where keys are trusted it is refused until it is again, --signing-key" in changed
    with pytest.raises(ServingError, match=CHANGED_CONFIG):
        served_files(target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-version", "3"), "expected --trusted-keys with them"),
        (("--private-folder", "/tmp"), "expected --trusted-keys with them"),
        (("--trusted-weights", "in-place"), "expected --trusted-keys with them"),
        (("--trusted-keys", "t.pem", "--min-version", "m=x"), "--min-version m=x: expected"),
        (("--trusted-keys", "t.pem", "--min-version", "m=-1"), "--min-version m=-1: expected"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[str, ...], message: str) -> None:
    done = command("run", "r", *options)
    assert done.exit_code == 1
    assert message in done.stderr
