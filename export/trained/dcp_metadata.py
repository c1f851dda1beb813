"""Read the metadata of a torch.distributed.checkpoint folder, which is a pickle, without running its code.

A pickle is a program. Here it may use few of pickle's opcodes. The names in it stand for harmless classes of ours,
never for objects of torch or Python: a call makes a Part, and a state is kept as the Part's attributes.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from export.errors import CheckpointError
from serving.files.reading import open_file

_METADATA = "torch.distributed.checkpoint.metadata"


class Part:
    """Stands for an object of the metadata. It drops its arguments, and keeps its state as attributes.

    A state that is no dict is kept as the attribute `state`.
    """

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class TensorPart(Part):
    """Stands for TensorStorageMetadata."""


class _Dict(dict[str | Part, object]):
    def __setitem__(self, key: str | Part, value: object) -> None:
        if not isinstance(key, str | Part):  # the hash of a tuple of tuples of … takes all of the stack
            raise pickle.UnpicklingError(f"expected a name or an index of metadata, got {type(key).__name__}")
        super().__setitem__(key, value)


# Every name that a FileSystemWriter's metadata may hold, and what stands for it here. Python 3.13 names paths
# differently; both names are here.
_NAMES: Mapping[tuple[str, str], Any] = {
    (_METADATA, "TensorStorageMetadata"): TensorPart,
    **dict.fromkeys(
        (
            (_METADATA, "BytesStorageMetadata"),
            (_METADATA, "ChunkStorageMetadata"),
            (_METADATA, "Metadata"),
            (_METADATA, "MetadataIndex"),
            (_METADATA, "StorageMeta"),
            (_METADATA, "TensorProperties"),
            (_METADATA, "_MEM_FORMAT_ENCODING"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
        ),
        Part,
    ),
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.STACK_GLOBAL),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)


class _Unpickler(pickle._Unpickler):  # Python's own in Python: the one in C takes every opcode
    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES} | {
        pickle.EMPTY_DICT[0]: lambda unpickler: unpickler.append(_Dict())
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")
        return _NAMES[module, name]


def read_parts(path: Path) -> object:
    """Read the metadata at `path` as nested parts. Whether they fit together is not checked here.

    Raises:
        CheckpointError: the file cannot be read, or is no such metadata.
    """
    try:
        with open_file(path, follow=True) as file:
            return _Unpickler(file).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: expected the metadata of torch.distributed.checkpoint: {error!r}") from error
