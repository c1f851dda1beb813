"""Whatever lies in place of a file, no command waits for it or is led elsewhere; what an operator links to is followed."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from export import export_model
from export.__main__ import app as export_app
from export.publish.published import prune
from serving.__main__ import app
from serving.backend.recorder import Recorder
from serving.bundle.load import open_bundle, verify_digests
from serving.bundle.signature import TrustedKeys, read_signing_key
from serving.engine import Engine
from serving.errors import ConfigurationError, ServingError
from serving.files import open_file, read_file, replacing
from serving.model.settings import ServingSettings
from serving.requests.captured import read_captured
from serving.server.run_file import find_run_file
from tests.support.models import SUM, collection
from tests.support.special_files import KINDS, endless, link, listener, pipe, put


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(collection(SUM), tmp_path_factory.mktemp("files") / "r", "m")


@pytest.fixture
def bundle(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published.parent, tmp_path / "r" / "m")) / "1"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_special_and_endless_files_are_refused(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    with pytest.raises(OSError, match=r"expected a file, got|expected at most|No such device or address"):
        read_file(put(tmp_path / "x", kind))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_without_room_names_the_file(tmp_path: Path, code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)) as raised, replacing(tmp_path / "scores"):
        raise OSError(code, os.strerror(code))  # as file.write raises it
    assert (raised.value.errno, raised.value.filename) == (code, str(tmp_path / "scores"))
    assert not [*tmp_path.iterdir()]


def test_a_followed_link_must_lead_to_a_file(tmp_path: Path) -> None:
    assert read_file(put(tmp_path / "x", link), follow=True) == b"{}"
    for device in ("/dev/zero", "/dev/tty", "/dev/stdin"):
        (tmp_path / "d").unlink(missing_ok=True)
        (tmp_path / "d").symlink_to(device)
        with pytest.raises(OSError, match=r"expected a file|No such device|Permission denied|No such file"):
            open_file(tmp_path / "d", follow=True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["1/manifest.json", "1/model.py", "1/program.pt", "config.pbtxt"])
def test_commands_on_a_model_end_with_one_line_on_special_files(
    bundle: Path, name: str, kind: Callable[[Path], None]
) -> None:
    path = put(bundle.parent / name, kind)
    commands = (
        [app, "configure", bundle.parent] if name == "config.pbtxt" else [export_app, "inspect", bundle],
        [export_app, "verify", bundle.parent],
    )
    for application, *arguments in commands:
        done = CliRunner().invoke(application, list(map(str, arguments)))  # type: ignore[arg-type]
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1), done.output
        assert path.name in done.stderr


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_publishing_and_pruning_do_not_hang_on_other_kinds_of_files(
    bundle: Path, kind: Callable[[Path], None]
) -> None:
    shutil.copytree(bundle, bundle.with_name("2"))
    put(bundle / "manifest.json", kind)
    assert [fate.kept_because for fate in prune(bundle.parent, 1, dry_run=True)] == ["among the newest 1", None]
    put(bundle.parent / "config.pbtxt", kind)
    with pytest.raises(ConfigurationError, match=r"config\.pbtxt: "):
        export_model(collection(SUM), bundle.parent.parent, "m")


@pytest.mark.parametrize("kind", [pipe, listener, endless, Path.mkdir], ids=lambda kind: kind.__name__)
def test_special_files_are_refused_as_keys_and_captured_requests(
    tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    path = put(tmp_path / "m.jsonl", kind)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        TrustedKeys.read(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_signing_key(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        list(read_captured(path, follow=True))
    if kind is not Path.mkdir:
        with pytest.raises(ConfigurationError, match="cannot be written"):
            Recorder.of(ServingSettings(capture=str(tmp_path)), "m", lambda _: None, pytest.fail)


def test_a_pipe_in_place_of_a_run_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"tbe-serve-{os.getuid()}"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "8000-0.json")
    assert find_run_file("127.0.0.1:8000") is None


def test_links_made_by_an_operator_are_followed(bundle: Path, tmp_path: Path) -> None:
    """A repository, a version, weights on another disk; keys, as Kubernetes mounts them."""
    (tmp_path / "disk").mkdir()
    shutil.move(bundle / "weights.0.bin", tmp_path / "disk" / "w")
    (bundle / "weights.0.bin").symlink_to(tmp_path / "disk" / "w")
    bundle.with_name("2").symlink_to("1")
    (tmp_path / "linked").symlink_to(bundle.parent.parent)
    opened = open_bundle(tmp_path / "linked" / "m" / "2")
    verify_digests(opened)
    Engine(opened)
    (tmp_path / "keys.pem").write_text("")
    (tmp_path / "mounted.pem").symlink_to("keys.pem")
    with pytest.raises(ServingError, match="got none"):
        TrustedKeys.read(tmp_path / "mounted.pem")
