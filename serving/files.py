"""Read files from untrusted sources safely, and write files whole or not at all."""

import errno
import fcntl
import glob
import json
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

# Maximum bytes of a manifest, a settings file, a signature or a file of keys.
SMALL = 64 << 20
# The errors of a write that has no room: on the disk, in a quota, or below the limit of a file's size.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_file(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: whether `path` may be a symbolic link, as for a file that the operator names. Its parent folders
            always may be.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(error.errno, "expected a file, got a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
    return open(descriptor, "rb")


def read_file(path: Path, most_bytes: int = SMALL, *, follow: bool = False) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: as for `open_file`, or the file is larger than `most_bytes`.
    """
    with open_file(path, follow=follow) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, got more", str(path))
    return content


# The errors of decoding a text that is not JSON, has an unexpected type, is not UTF-8, or is nested too deep.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the types that JSON is decoded to: immutable and keyword-only. JSON with unknown keys is refused."""


class _Object(dict[str, Any]):
    """A JSON object. `twice` is a repeated key, or None."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = None if len(self) == len(pairs) else Counter(key for key, _ in pairs).most_common(1)[0][0]


def json_tree(text: bytes) -> Any:
    """JSON as dicts, lists, text and floats. Unlike msgspec and json, this refuses an object with a repeated key.

    Raises:
        ValueError: an object has a repeated key, or `text` is not JSON. The message names the key as msgspec does:
            `$.a[0].b`.
        RecursionError: the text is nested too deep.
    """
    # int() would refuse 5,000 digits. The numbers of this tree are not used.
    tree = json.loads(text.decode(), object_pairs_hook=_Object, parse_int=float)
    for path in _repeated_keys(tree, "$"):
        raise ValueError(f"expected each key once, got `{path}` twice")
    return tree


def _repeated_keys(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, _Object):
        if node.twice is not None:
            yield f"{path}.{node.twice}"
        for key, child in node.items():
            yield from _repeated_keys(child, f"{path}.{key}")
    elif isinstance(node, list):
        for number, child in enumerate(node):
            yield from _repeated_keys(child, f"{path}[{number}]")


def is_utf8(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8, which protobuf and JSON need. Command lines can have other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_url(path: str | Path) -> bool:
    """Whether `path` is a URL instead of a folder. A Path made of a URL, which loses a slash, also counts."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def as_text(path: Path | str) -> str:
    """`path` with U+FFFD in place of bytes that are not UTF-8, so that it can be part of JSON and HTML."""
    return os.fsencode(path).decode(errors="replace")


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent` that only its user can open. It is removed when the block ends.

    The folder is locked while it is in use. Folders with the prefix that no process has locked are removed first.

    Raises:
        OSError: `parent` cannot be written to.
    """
    _remove_abandoned(parent, prefix)
    root, lock = _locked_folder(parent, prefix)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        root = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        with suppress(FileNotFoundError):
            lock = _open_folder(root)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if root.exists():
                return root, lock
            os.close(lock)
        # Another process removed it as abandoned before it was locked. Make another.


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for root in parent.glob(glob.escape(prefix) + "*"):
        try:
            lock = _open_folder(root)
        except OSError:
            continue  # it was just removed, or belongs to another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # it is in use
        else:
            shutil.rmtree(root, ignore_errors=True)
        finally:
            os.close(lock)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


@contextmanager
def locked_file(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing. Several holders are possible if all are `shared`.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def sync_tree(root: Path) -> None:
    """Sync every file and folder under `root` to the disk, so that a renamed folder is whole after a crash."""
    for folder, _, names in os.walk(root):
        for name in names:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))


def make_content(path: Path, content: bytes | None) -> None:
    """Write `content` to a file unless the file already has it. With None, remove the file."""
    if content is None:
        if path.exists():  # a read-only file system refuses to remove even a missing file
            path.unlink()
    elif not path.exists() or path.stat().st_size != len(content) or read_file(path, len(content)) != content:
        with replacing(path) as file:
            file.write(content)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(draft: Path, target: Path, large_bytes: int) -> None:
    """Rename a finished folder, so that it appears whole, even after a crash.

    Args:
        draft: the folder.
        target: its new path.
        large_bytes: files of this size and larger are dropped from the page cache.
    """
    sync_tree(draft)
    leave_out_of_cache(draft, large_bytes)
    draft.rename(target)
    sync_folder(target.parent)


def leave_out_of_cache(folder: Path, least_bytes: int) -> None:
    """Drop the large files of a folder from the page cache, which holds written files in small pages.

    Args:
        folder: a folder whose files are synced to the disk.
        least_bytes: the minimum size of a large file.
    """
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size >= least_bytes:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def naming_full_disk(path: Path | str) -> Iterator[None]:
    """During the block, name `path` in errors of writes without room. Python's errors of writes name no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, is_new: bool = False) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends. If the block fails, the new file is removed.

    Args:
        path: the path of the file.
        mode: its permissions.
        is_new: whether the file must not exist yet. Of several concurrent writers, one succeeds.

    Raises:
        FileExistsError: the file exists although `is_new` is set.
        OSError: the file cannot be written.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with naming_full_disk(path), os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        (os.link if is_new else os.replace)(draft, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
