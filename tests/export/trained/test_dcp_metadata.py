"""A checkpoint's metadata is a pickle: whatever opcodes it is made of, reading it runs nothing and changes nothing."""

import builtins
import copyreg
import os
import pickle
import pickletools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict_saver import save

from export.errors import CheckpointError
from export.trained import dcp
from export.trained.checkpoint_files import CheckpointFiles
from export.trained.stored_tensors import StoredTensor

HEAD = b"\x80\x04"


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    return dcp.open_folder(folder, CheckpointFiles(folder, dcp.FILES))


ALLOWED = (
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("pathlib", "PosixPath"),
)
# What a name would have to reach for code to run; the first are the ways through what was allowed once.
HARMFUL = (
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.metadata", "os"),
    ("torch.distributed.checkpoint.metadata", "dataclass"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
    ("torch.distributed.checkpoint.metadata", "torch.load"),
    ("pathlib", "PosixPath.touch"),
    ("pathlib", "Path"),
    ("torch", "serialization.os.system"),
    ("torch", "float32.__class__"),
    ("torch.serialization", "_get_layout.__globals__"),
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "exec"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("tests.planted", "touched"),
)


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"\x8c" + bytes([len(encoded)]) + encoded


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(content)
    return folder


@pytest.fixture
def harmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is there once code ran: code that a module runs as it is imported, or a command of the shell."""
    harmed = tmp_path / "harmed"
    package = tmp_path / "planted_package"
    package.mkdir()
    (package / "planted.py").write_text(f"open({str(harmed)!r}, 'w')\ndef touched(*_): open({str(harmed)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(package))
    yield harmed
    sys.modules.pop("planted", None)


def snapshot() -> dict[str, Any]:
    """All that a pickle could write into: what the names of the metadata stand for in this process."""
    holders: list[Any] = [torch.Size, torch.serialization._get_layout, type(Path()), Path, os, builtins]
    holders += [value for module in (metadata, filesystem) for value in vars(module).values() if type(value) is type]
    holders += [metadata, filesystem, metadata._MEM_FORMAT_ENCODING]
    return {f"{number} {holder}": dict(vars(holder)) for number, holder in enumerate(holders)}


@pytest.mark.promise("Exporting a checkpoint runs no code from its pickles")
@pytest.mark.parametrize(("module", "name"), [*HARMFUL, ("planted", "touched")])
def test_no_named_function_is_called(tmp_path: Path, harmed: Path, module: str, name: str) -> None:
    call = text(f"touch {harmed}") + b"\x85R"
    for content in (
        HEAD + named(module, name) + call + b".",  # STACK_GLOBAL, REDUCE
        f"c{module}\n{name}\n(S'touch {harmed}'\ntR.".encode(),  # GLOBAL
        f"(S'touch {harmed}'\ni{module}\n{name}\n.".encode(),  # INST
        f"(c{module}\n{name}\nS'touch {harmed}'\no.".encode(),  # OBJ
        HEAD + named(module, name) + text(str(harmed)) + b"\x85\x81.",  # NEWOBJ
        HEAD + named(module, name) + text(str(harmed)) + b"\x85}\x92.",  # NEWOBJ_EX
    ):
        with pytest.raises(CheckpointError, match=r"\.metadata: expected the metadata of"):
            open_folder(write(tmp_path / "c", content))
    assert not harmed.exists()
    assert "planted" not in sys.modules


def test_registered_pickle_extensions_are_refused(tmp_path: Path, harmed: Path) -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        loads = b"\x82\xf0" + text(f"touch {harmed}.0") + b"\x85R."
        pickle.loads(HEAD + loads)  # from now on Python knows it without asking for its name
        assert Path(f"{harmed}.0").exists()
        for extension in (b"\x82\xf0", b"\x83\xf0\x00", b"\x84\xf0\x00\x00\x00"):
            with pytest.raises(CheckpointError):
                open_folder(write(tmp_path / "c", HEAD + extension + text(f"touch {harmed}") + b"\x85R."))
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert not harmed.exists()


@pytest.mark.parametrize(("module", "name"), ALLOWED)
def test_attributes_of_allowed_classes_and_functions_cannot_be_set(tmp_path: Path, module: str, name: str) -> None:
    """BUILD sets attributes of whatever is on the stack: a class, a function, a member of an enumeration."""
    before = snapshot()
    for owner in (named(module, name), named(module, name) + b")\x81", named(module, name) + b")R"):
        for attribute in ("cache", "__setstate__", "__init__", "__new__", "__code__", "__class__", "state"):
            item = text(attribute) + named("torch", "Size")
            for state in (b"}" + item + b"s", b"N}" + item + b"s\x86"):
                with pytest.raises(CheckpointError):
                    open_folder(write(tmp_path / "c", HEAD + owner + state + b"b."))
    assert snapshot() == before


WORDS = (
    "os",
    "system",
    "touched",
    "planted",
    "__class__",
    "torch",
    "Size",
    "state_dict_metadata",
    "storage_data",
    "0",
)
ARGUMENTS: dict[str, Callable[[random.Random], bytes]] = {
    "stringnl": lambda r: f"'{r.choice(WORDS)}'\n".encode(),
    "stringnl_noescape": lambda r: f"{r.choice(WORDS)}\n".encode(),
    "stringnl_noescape_pair": lambda r: "{}\n{}\n".format(*r.choice((*HARMFUL, *ALLOWED))).encode(),
    "unicodestringnl": lambda r: f"{r.choice(WORDS)}\n".encode(),
    "decimalnl_short": lambda r: f"{r.randint(0, 5)}\n".encode(),
    "decimalnl_long": lambda r: f"{r.randint(0, 5)}L\n".encode(),
    "floatnl": lambda _: b"1.5\n",
    "float8": lambda _: bytes(8),
    "uint1": lambda r: bytes([r.randint(0, 5)]),
    "uint2": lambda r: bytes([r.randint(0, 5), 0]),
    "uint4": lambda r: bytes([r.randint(0, 5), 0, 0, 0]),
    "uint8": lambda r: bytes([r.randint(0, 5), *bytes(7)]),
    "int4": lambda r: bytes([r.randint(0, 5), 0, 0, 0]),
    "long1": lambda _: b"\x01\x05",
    "long4": lambda _: b"\x01\0\0\0\x05",
}


def operation(random: random.Random, opcode: Any) -> bytes:
    code: bytes = opcode.code.encode("latin-1")
    if opcode.name == "PROTO":
        return code + bytes([random.randint(0, 5)])
    if opcode.name == "FRAME":
        return b""  # it only says how much to read at once
    if opcode.arg is None:
        return code
    if opcode.arg.name in ARGUMENTS:
        return code + ARGUMENTS[opcode.arg.name](random)
    width = {"1": 1, "4": 4, "8": 8}[opcode.arg.name[-1]]  # strings and bytes with their length before them
    word = random.choice(WORDS).encode()
    return code + len(word).to_bytes(width, "little") + word


CALLING = {"REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
CALLING |= {"STACK_GLOBAL", "GLOBAL", "APPENDS", "ADDITEMS", "SETITEMS", "APPEND", "SETITEM"}


def made_up(random: random.Random, harmed: Path) -> bytes:
    """A pickle of any opcodes, those that call or resolve most of all, on names that may be there and may not."""
    parts = [b"\x80\x04"]
    for _ in range(random.randint(3, 40)):
        kind = random.randint(0, 9)
        name = named(*random.choice((*ALLOWED, *ALLOWED, *HARMFUL, ("planted", "touched"))))
        argument = text(f"touch {harmed}") + b"\x85"
        call = operation(random, random.choice([opcode for opcode in pickletools.opcodes if opcode.name in CALLING]))
        if kind < 7:
            parts.append((name, argument, call, name + argument + call, name + argument + b"R")[kind % 5])
        else:
            parts.append(operation(random, random.choice(pickletools.opcodes)))
    return b"".join(parts) + b"."


def mutated(random: random.Random, whole: bytes) -> bytes:
    """A checkpoint's own metadata with a few operations put between its own."""
    places = [position for _, _, position in pickletools.genops(whole) if position is not None and position > 11]
    content = whole[:2] + whole[11:]  # without its frame
    for _ in range(random.randint(1, 4)):
        offset = random.choice(places) - 9
        content = content[:offset] + operation(random, random.choice(pickletools.opcodes)) + content[offset:]
    return content


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "c"
    state = {"sparse": {"weight": torch.arange(12.0).reshape(3, 4)}, "step": 3, "half": torch.zeros(2, 2).half()}
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.promise("Exporting a checkpoint runs no code from its pickles")
def test_every_opcode_that_calls_or_resolves_runs_nothing(tmp_path: Path, harmed: Path, checkpoint: Path) -> None:
    before, source = snapshot(), random.Random(0)
    whole = (checkpoint / ".metadata").read_bytes()
    refused = 0
    for number in range(6000):
        content = made_up(source, harmed) if number % 2 else mutated(source, whole)
        try:
            open_folder(write(tmp_path / "c", content))
        except CheckpointError:
            refused += 1
    assert refused > 5000
    assert not harmed.exists()
    assert "planted" not in sys.modules
    assert snapshot() == before


def test_pickle_itself_would_run_the_planted_call(harmed: Path) -> None:
    """By Python's own reader, what the test above is made of does run."""
    pickle.loads(HEAD + named("os", "system") + text(f"touch {harmed}") + b"\x85R.")
    assert harmed.exists()


@pytest.mark.long
def test_a_pickle_cannot_end_the_process(tmp_path: Path) -> None:
    """Keys of a million tuples in one another: their hash would take all of the stack."""
    deep = HEAD + b"})" + b"\x85" * 1_000_000 + b"Ns."
    nested = HEAD + b"]" * 1_000_000 + b"a" * 999_999 + b"."
    folders = [str(write(tmp_path / str(number), content)) for number, content in enumerate((deep, nested))]
    code = (
        "from export.trained.checkpoint import open_checkpoint; from export.errors import CheckpointError\n"
        f"for folder in {folders}:\n"
        "    try: open_checkpoint(folder)\n"
        "    except CheckpointError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\nrefused\n")


def test_a_real_checkpoint_still_reads(checkpoint: Path) -> None:
    tables = open_folder(checkpoint)
    assert {key: (table.shape, table.dtype) for key, table in tables.items()} == {
        "sparse.weight": ((3, 4), torch.float32),
        "half": ((2, 2), torch.float16),
    }
    assert torch.equal(tables["sparse.weight"].read(1, 3), torch.arange(12.0).reshape(3, 4)[1:])


def test_a_checkpoint_of_an_older_python_is_read_as_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 3.11.4, such as Debian 12's own, a member of an enumeration is pickled as a call of getattr."""
    content = (checkpoint / ".metadata").read_bytes()
    result, tables = pickle.loads(content), open_folder(checkpoint)
    encoding = metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, _: (getattr, (encoding, self.name)))
    older = pickle.dumps(result, 4)
    assert b"getattr" in older
    (checkpoint / ".metadata").write_bytes(older)
    try:
        again = open_folder(checkpoint)
        assert all(torch.equal(again[key].read(0, 2), table.read(0, 2)) for key, table in tables.items())
    finally:
        (checkpoint / ".metadata").write_bytes(content)


def test_chunks_outside_the_checkpoint_folder_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    result = pickle.loads((checkpoint / ".metadata").read_bytes())
    (data,) = {info.relative_path for info in result.storage_data.values()}
    for path in (f"../{checkpoint.name}/{data}", str(checkpoint / data), "pipe"):
        for info in result.storage_data.values():
            info.relative_path = path
        folder = write(tmp_path / "c", pickle.dumps(result))
        if path == "pipe":
            os.mkfifo(folder / path)
        with pytest.raises(CheckpointError, match=r"expected a plain chunk|pipe: cannot be opened"):
            open_folder(folder)
