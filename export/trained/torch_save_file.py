"""A file of `torch.save`: a zip archive with a pickle, which says where in the archive the numbers of each tensor
are.

The format is the one of torch 1.6 to 2.13. A pickle is a program. It is read without running its code: a name in it
stays a name, and a call of a name makes a tensor, a dict, or a record of the object that the call would have made.
Objects that are neither tensors nor dicts are skipped, so they do no harm.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from export.errors import CheckpointError
from export.trained.checkpoint_files import CheckpointFile
from export.trained.stored_tensors import InFile, StoredTensor, UnreadableTensor
from serving.range_file import RangeFile

# The most levels of nested dicts that are searched.
_MAX_DEPTH = 64
_SAVE = "save a state dict: torch.save(module.state_dict(), …)"
# The first bytes of a file of torch.save before torch 1.6.
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)[:-1]
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Archive(NamedTuple):
    """The tensors of an archive, and the versions of the modules whose state dicts are in it.

    Attributes:
        tensors: by key. A key in nested dicts is "outer.inner". If the archive is one tensor, its key is "". A tensor
            that is not plain, such as a DTensor, raises when it is read.
        versions: the version of each module by its path, after the names of outer dicts. `Module.state_dict` puts
            them into the `_metadata` of its result; a plain copy of the dict does not have them.
    """

    tensors: dict[str, StoredTensor]
    versions: dict[str, int]


def locate_tensors(file: CheckpointFile, start: int = 0, length: int | None = None) -> Archive:
    """Find the tensors of the archive at bytes [start, start + length) of `file`.

    Args:
        file: the file.
        start: the archive's first byte.
        length: the archive's bytes. None: up to the end of the file.

    Raises:
        CheckpointError: there is no such archive, or it has objects and no tensors.
    """
    where = f"{file.path}: expected an archive of torch.save at byte {start}"
    try:
        loaded = _Unpickler(_Records(file, start, file.size - start if length is None else length)).load()
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{where}: {error}: it is of another kind, or was cut off: {_SAVE}") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: its pickle is nested too deep") from error
    except Exception as error:  # a damaged zip file or pickle can raise anything
        raise CheckpointError(f"{where}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    archive, objects = _flatten(str(file.path), loaded)
    if not archive.tensors and objects:
        raise CheckpointError(
            f"{file.path}: expected tensors and plain containers alone at byte {start}, found {objects[0]}, "
            f"which only running code could read: {_SAVE}"
        )
    return archive


class _Records:
    """The records of an archive. Their names are without the name of the archive."""

    def __init__(self, file: CheckpointFile, start: int, length: int) -> None:
        self._file, self._start, self._end = file, start, start + length
        if file.read_bytes(start, min(length, len(_LEGACY))) == _LEGACY:
            raise CheckpointError(
                f"{file.path}: expected an archive of torch.save, found the format from before torch 1.6: load "
                "it and save it again with torch.save"
            )
        archive_file = RangeFile(length, lambda first, count: file.read_bytes(start + first, count))
        with zipfile.ZipFile(io.BufferedReader(archive_file)) as archive:
            self._infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            directory = archive.start_dir
        if "constants.pkl" in self._infos:
            raise CheckpointError(f"{file.path}: expected an archive of torch.save, found a TorchScript one: {_SAVE}")
        if "data.pkl" not in self._infos:
            raise CheckpointError(f"{file.path}: expected an archive of torch.save, found a zip file of another kind")
        file.read_part(start + directory, length - directory)
        # torch.serialization.set_crc32_options(False) leaves the sums out.
        if not any(info.CRC for info in self._infos.values()):
            file.dated = True
        self.pickle = self.read("data.pkl")
        if "byteorder" in self._infos and self.read("byteorder") != b"little":
            raise CheckpointError(
                f"{file.path}: expected little-endian numbers, found big-endian ones: save it again"
            )

    def read(self, name: str) -> bytes:
        """The bytes of a small record."""
        return self._file.read_part(*self.locate(name))

    def locate(self, name: str) -> tuple[int, int]:
        """The first byte of a record in the file, and its number of bytes."""
        info = self._infos[name]
        header = self._start + info.header_offset
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(self._file.read_bytes(header, _LOCAL_HEADER.size))
        first = header + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != b"PK\3\4" or info.compress_type != zipfile.ZIP_STORED or first + info.file_size > self._end:
            raise zipfile.BadZipFile(f"record {name!r} is not stored as torch does it")
        return first, info.file_size

    def tensor(self, storage: "_Storage", offset: int, shape: Any, strides: Any, dtype: torch.dtype) -> InFile:
        """A tensor in a storage; `offset` and `strides` count elements of `dtype`."""
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(type(number) is int and number >= 0 for number in numbers):
            raise pickle.UnpicklingError(f"expected a shape and strides, got {shape} and {strides}")
        last = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        if 0 not in shape and (last + 1) * dtype.itemsize > storage.size:
            raise pickle.UnpicklingError(f"a tensor {list(shape)} is larger than its storage")
        return InFile(
            file=self._file,
            offset=storage.first + offset * dtype.itemsize,
            shape=tuple(shape) or (1,),
            strides=tuple(stride * dtype.itemsize for stride in strides) or (dtype.itemsize,),
            dtype=dtype,
        )


class _Storage(NamedTuple):
    """The numbers of some tensors: their first byte in the file, their bytes, and their dtype."""

    first: int
    size: int
    dtype: torch.dtype | None


class _Mapping(dict[object, object]):
    """A dict without the items whose key is no plain value: the hash of deeply nested tuples overflows the stack.

    Attributes:
        metadata: the `_metadata` of a state dict: facts about each module, by its path.
    """

    metadata: "_Mapping | None" = None

    def __setitem__(self, key: object, value: object) -> None:
        if isinstance(key, str | int | float):
            super().__setitem__(key, value)


@dataclass(slots=True, frozen=True, eq=False)
class _Name:
    """A class or a function, which stays a name."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(slots=True, frozen=True, eq=False)
class _Object:
    """The object that calling a class or a function would have made, without its content."""

    path: str
    is_tensor: bool

    def append(self, _: object) -> None:
        """Drop an item of a list or a set, or several."""

    extend = add = append

    def __setitem__(self, _: object, __: object) -> None:
        """Drop an item of a dict."""


def _path(value: object) -> str:
    """The name of a class or dtype, for messages if it is something else."""
    return value.path if isinstance(value, _Name | _Object) else type(value).__name__


# The kind of tensor that a function makes.
_KINDS = {
    "_rebuild_sparse_tensor": "sparse tensor",
    "_rebuild_nested_tensor": "nested tensor",
    "_rebuild_qtensor": "quantized tensor",
    "_rebuild_meta_tensor_no_storage": "tensor on the meta device, which has no numbers",
}
_TENSORS = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict", "builtins.dict", "collections.Counter")
_STORAGES = {f"torch.{name}": dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()} | {
    "torch.storage.UntypedStorage": torch.uint8
}
_DTYPES = {f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP),
    *(pickle.MEMOIZE, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.FLOAT, pickle.BINFLOAT),
    *(pickle.INT, pickle.LONG, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
    *(pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.BINBYTES8, pickle.BYTEARRAY8, pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.BINUNICODE8, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(
        pickle.EMPTY_LIST,
        pickle.LIST,
        pickle.APPEND,
        pickle.APPENDS,
        pickle.ADDITEMS,
        pickle.SETITEM,
        pickle.SETITEMS,
    ),
)


class _Unpickler(pickle._Unpickler):  # the one written in Python: the one in C allows every opcode
    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def __init__(self, records: _Records) -> None:
        super().__init__(io.BytesIO(records.pickle), encoding="utf-8", errors="replace")
        self._records = records

    def find_class(self, module: str, name: str) -> _Name:
        return _Name(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, count = pid
        dtype = _STORAGES.get(_path(storage_type))
        first, size = self._records.locate(f"data/{key}")
        if kind != "storage" or (dtype is not None and count * dtype.itemsize > size):
            raise pickle.UnpicklingError(f"expected a storage of {count} numbers, found {size} bytes")
        return _Storage(first, size, dtype)

    def _call(self, function: object, args: Any) -> object:
        """The result of a call of `function`, without calling it."""
        if not isinstance(function, _Name | _Object) or not isinstance(args, tuple):
            raise pickle.UnpicklingError(f"expected a name to call, got {type(function).__name__}")
        path = function.path
        if path in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
            storage, offset, shape, strides = args[:4]
            bits = args[6] if len(args) > 6 else None
            return self._tensor(storage, offset, shape, strides, storage.dtype, bits)
        if path == "torch._utils._rebuild_tensor_v3":
            storage, offset, shape, strides, _, _, dtype, *bits = args
            return self._tensor(storage, offset, shape, strides, _DTYPES[_path(dtype)], bits and bits[0])
        if path in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return args[0]
        if path in ("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2"):
            function, kind, arguments = args[:3]
            if _path(kind) in _TENSORS:
                return self._call(function, arguments)
            return _Object(_path(kind), is_tensor=True)
        if path == "torch.Size":
            return tuple(args[0])
        if path in _MAPPINGS:
            return _Mapping()
        if path == "copyreg._reconstructor":
            path = _path(args[0])
        name = path.rpartition(".")[2]
        return _Object(_KINDS.get(name, path), is_tensor=name in _KINDS or name.endswith("Tensor"))

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, strides: Any, dtype: torch.dtype | None, bits: Any
    ) -> InFile | _Object:
        if dtype is None:
            return _Object("tensor of an unknown dtype", is_tensor=True)
        if bits and any(bits.values()):
            return _Object("view that is conjugated or negated when it is read", is_tensor=True)
        return self._records.tensor(storage, offset, shape, strides, dtype)


def _on_stack(make: Callable[[Any], object]) -> Callable[[Any], None]:
    """An opcode that pushes the result of `make` on the stack."""
    return lambda unpickler: unpickler.append(make(unpickler))


def _reduce(unpickler: Any) -> object:
    args = unpickler.stack.pop()
    return unpickler._call(unpickler.stack.pop(), args)


def _new_with_keywords(unpickler: Any) -> object:
    unpickler.stack.pop()
    return _reduce(unpickler)


def _dict(unpickler: Any) -> object:
    items = unpickler.pop_mark()
    mapping = _Mapping()
    for key, value in zip(items[::2], items[1::2], strict=True):
        mapping[key] = value
    return mapping


def _frozenset(unpickler: Any) -> object:
    unpickler.pop_mark()
    return _Object("frozenset", is_tensor=False)


def _build(unpickler: Any) -> None:
    attributes = unpickler.stack.pop()
    target = unpickler.stack[-1]
    if isinstance(target, _Mapping) and isinstance(attributes, _Mapping):
        metadata = attributes.get("_metadata")
        target.metadata = metadata if isinstance(metadata, _Mapping) else None


_Unpickler.dispatch |= {
    pickle.EMPTY_DICT[0]: _on_stack(lambda _: _Mapping()),
    pickle.DICT[0]: _on_stack(_dict),
    pickle.EMPTY_SET[0]: _on_stack(lambda _: _Object("set", is_tensor=False)),
    pickle.FROZENSET[0]: _on_stack(_frozenset),
    pickle.REDUCE[0]: _on_stack(_reduce),
    pickle.NEWOBJ[0]: _on_stack(_reduce),
    pickle.NEWOBJ_EX[0]: _on_stack(_new_with_keywords),
    pickle.BUILD[0]: _build,
}


def _flatten(where: str, loaded: object) -> tuple[Archive, list[str]]:
    """The tensors in nested dicts, and the names of objects that are neither tensors nor plain values."""
    archive = Archive({}, {})
    objects = []
    waiting = [("", loaded, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if isinstance(value, InFile) or (isinstance(value, _Object) and value.is_tensor):
            if key in archive.tensors:
                raise CheckpointError(
                    f"{where}: has {key!r} twice, as a key and as a path in nested dicts: save one of them"
                )
            archive.tensors[key] = value if isinstance(value, InFile) else _not_plain(where, key, value.path)
        elif isinstance(value, _Mapping) and depth < _MAX_DEPTH:
            inner = [(f"{key}.{name}" if depth else str(name), item, depth + 1) for name, item in value.items()]
            waiting += reversed(inner)
            for path, about in (value.metadata or {}).items():
                version = about.get("version") if isinstance(about, _Mapping) else None
                if isinstance(version, int):
                    archive.versions[f"{key}.{path}" if depth else str(path)] = version
        elif isinstance(value, _Object | _Name):
            objects.append(value.path)
    return archive, objects


def _not_plain(where: str, key: str, path: str) -> UnreadableTensor:
    kind = path.rpartition(".")[2]
    if "sharded_tensor" in path or kind == "DTensor":
        instead = "save the model with torch.distributed.checkpoint and give the folder, or save its whole tensors"
    else:
        instead = "save a dense tensor in its place"
    return UnreadableTensor(where, key, f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}", instead)
