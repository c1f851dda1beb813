"""Columns of any library that has Arrow's PyCapsule protocol, such as polars and pyarrow, as numpy arrays.

No library is imported, and nothing is copied but bitmaps and the items of runs: the arrays are views of the column's
own buffers. The structures are those of https://arrow.apache.org/docs/format/CDataInterface.html and
CStreamInterface.html.
"""

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from serving.requests.types import Array, Mask

_DTYPES = {
    "c": np.int8,
    "C": np.uint8,
    "s": np.int16,
    "S": np.uint16,
    "i": np.int32,
    "I": np.uint32,
    "l": np.int64,
    "L": np.uint64,
    "e": np.float16,
    "f": np.float32,
    "g": np.float64,
}
_NULLS, _BOOLEANS, _STRUCTS = "n", "b", "+s"
_LISTS = {"+l": np.int32, "+L": np.int64}
_LIST_VIEWS = {"+vl": np.int32, "+vL": np.int64}
_FIXED_LISTS = "+w:"
_RUNS = "+r"


class DamagedColumn(ValueError):
    """A column whose offsets or indices are outside its values. Arrow's libraries do not check all of them."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: `validate(full=True)` of its library checks a column")


class ArrowStream(Protocol):
    """A column in chunks, or a table: polars Series and DataFrame, pyarrow ChunkedArray and Table."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """A capsule with an ArrowArrayStream."""


class ArrowArray(Protocol):
    """A column in one piece: pyarrow Array."""

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        """Capsules with an ArrowSchema and an ArrowArray."""


@dataclass(frozen=True, eq=False, slots=True)
class ArrowChunk:
    """A piece of a column: the part that a slice shows.

    Attributes:
        name: of a struct's field.
        length: items.
        valid: which items are not null, bool [length]; None: all.
        values: numbers or booleans [length], whatever is stored where an item is null; of a dictionary, indices.
            None for lists and structs, and for types that are not read.
        lengths: items of each list, int32 or int64 [length], 0 of a null; None: these are no lists.
        children: the items of all lists, one list after the other; the fields of a struct.
        dictionary: what `values` are indices of. None: they are numbers themselves.
    """

    name: str
    length: int
    valid: Mask | None
    values: Array | None = None
    lengths: npt.NDArray[np.signedinteger[Any]] | None = None
    children: "tuple[ArrowChunk, ...]" = ()
    dictionary: "ArrowChunk | None" = None


def is_arrow_column(column: Any) -> bool:
    """Whether a column has the protocol."""
    return hasattr(column, "__arrow_c_stream__") or hasattr(column, "__arrow_c_array__")


def read_chunks(column: ArrowStream | ArrowArray) -> list[ArrowChunk]:
    """The chunks of a column, in order. Their arrays are read-only, and keep its buffers alive."""
    if not hasattr(column, "__arrow_c_stream__"):
        schema, array = column.__arrow_c_array__()
        piece = _contents(array, b"arrow_array", _Array)
        return [_read(_contents(schema, b"arrow_schema", _Schema), piece, 0, piece.length, array)]
    capsule = column.__arrow_c_stream__()
    stream, schema = _contents(capsule, b"arrow_array_stream", _Stream), _Schema()
    _expect_success(stream, stream.get_schema(stream, schema))
    try:
        return [
            _read(schema, owner.piece, 0, owner.piece.length, owner)
            for owner in iter(lambda: _next_piece(stream), None)
        ]
    finally:
        schema.free()


class _Releasable(ctypes.Structure):
    def free(self) -> None:
        """Have the producer free what the structure points to."""
        if self.release:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.release)(ctypes.addressof(self))


class _Schema(_Releasable):
    pass


class _Array(_Releasable):
    pass


class _Stream(ctypes.Structure):
    pass


_Schema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_void_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.POINTER(ctypes.POINTER(_Schema))),
    ("dictionary", ctypes.POINTER(_Schema)),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
    ("dictionary", ctypes.POINTER(_Array)),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
_Stream._fields_ = [
    ("get_schema", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Stream), ctypes.POINTER(_Schema))),
    ("get_next", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Stream), ctypes.POINTER(_Array))),
    ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.POINTER(_Stream))),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]


class _Owner:
    """A piece that a stream handed over, which is freed with the last array that reads it."""

    def __init__(self) -> None:
        self.piece = _Array()
        weakref.finalize(self, self.piece.free).atexit = False


@dataclass(frozen=True, eq=False)
class _Buffer:
    """Memory as numpy's array interface describes it. An array of it keeps its owner alive."""

    owner: Any
    __array_interface__: dict[str, Any]


def _contents(capsule: Any, name: bytes, kind: Any) -> Any:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return kind.from_address(get_pointer(capsule, name))


def _expect_success(stream: Any, status: int) -> None:
    if status:
        message = stream.get_last_error(stream) or b""
        raise ValueError(f"a column that cannot be read: {message.decode(errors='replace') or status}")


def _next_piece(stream: Any) -> _Owner | None:
    owner = _Owner()
    _expect_success(stream, stream.get_next(stream, owner.piece))
    return owner if owner.piece.release else None


def _read(schema: Any, piece: Any, start: int, length: int, owner: Any) -> ArrowChunk:
    """Read `length` items of a piece, from `start` on.

    Args:
        schema: the type of the piece.
        piece: it may itself begin at an offset.
        start: counted from that offset.
        length: how many.
        owner: what keeps the buffers alive.
    """
    kind, first = schema.format.decode(), piece.offset + start
    name = (schema.name or b"").decode(errors="replace")
    if kind == _NULLS:
        return ArrowChunk(name, length, np.zeros(length, np.bool_) if length else None, np.zeros(length, np.int64))
    valid = None
    if piece.null_count and piece.buffers[0]:
        valid = _bits(piece.buffers[0], first, length, owner)
        valid = None if valid.all() else valid
    if kind == _BOOLEANS:
        return ArrowChunk(name, length, valid, _bits(piece.buffers[1], first, length, owner))
    if kind in _DTYPES:
        dictionary = None
        if schema.dictionary:
            words = piece.dictionary.contents
            dictionary = _read(schema.dictionary.contents, words, 0, words.length, owner)
        values = _view(piece.buffers[1], _DTYPES[kind], first, length, owner)
        return ArrowChunk(name, length, valid, values, dictionary=dictionary)
    if kind == _STRUCTS:
        return ArrowChunk(name, length, valid, children=(*_children(schema, piece, first, length, owner),))
    if kind in _LISTS:
        offsets: Any = np.zeros(1, np.int32)
        if length:
            offsets = _view(piece.buffers[1], _LISTS[kind], first, length + 1, owner)
        lengths = np.diff(offsets)
        _check_lists(offsets[0], lengths, offsets[-1], piece.children[0].contents.length)
        (items,) = _children(schema, piece, int(offsets[0]), int(offsets[-1] - offsets[0]), owner)
        return _lists(name, valid, None, lengths, items)
    if kind in _LIST_VIEWS:
        starts, lengths = (_view(piece.buffers[buffer], _LIST_VIEWS[kind], first, length, owner) for buffer in (1, 2))
        count = piece.children[0].contents.length
        if valid is not None:  # a null list may have any start and length
            starts, lengths = np.where(valid, starts, 0), np.where(valid, lengths, 0)
        last: Any = np.add(starts, lengths, dtype=np.int64).max(initial=0)
        _check_lists(starts.min(initial=0), lengths, last, count)
        (items,) = _children(schema, piece, 0, count, owner)
        return _lists(name, valid, starts, lengths, items)
    if kind.startswith(_FIXED_LISTS):
        width = int(kind.removeprefix(_FIXED_LISTS))
        (items,) = _children(schema, piece, first * width, length * width, owner)
        return _lists(name, valid, None, np.full(length, width, np.int32), items)
    if kind == _RUNS:
        count = piece.children[0].contents.length
        run_ends, items = _children(schema, piece, 0, count, owner)
        ends: Any = run_ends.values
        samples: Any = np.diff(np.clip(ends, first, first + length), prepend=first)
        return replace(_taken(items, np.repeat(np.arange(count), samples)), name=name)
    return ArrowChunk(name, length, valid)


def _check_lists(first: int, lengths: Any, last: int, count: int) -> None:
    """Refuse lists that are not within their `count` items.

    Args:
        first: where the first list starts.
        lengths: items of each list, [length].
        last: where the last list ends.
        count: the number of items.

    Raises:
        DamagedColumn: a list starts before the first item, ends after the last one, or has fewer than 0 items.
    """
    if first < 0 or last > count or lengths.min(initial=0) < 0:
        raise DamagedColumn(f"lists that are not within their {count} items")


def _lists(name: str, valid: Mask | None, starts: Any, lengths: Any, items: ArrowChunk) -> ArrowChunk:
    """Lists whose items follow one another, without the items of null lists and the items between lists.

    Args:
        name: of a struct's field.
        valid: which lists are not null, bool [length]; None: all.
        starts: where each list starts in `items`, [length]; None: where the list before it ends.
        lengths: items of each list, [length].
        items: of all lists.
    """
    if starts is None and (valid is None or not lengths[~valid].any()):
        return ArrowChunk(name, len(lengths), valid, lengths=lengths, children=(items,))
    starts = np.cumsum(lengths) - lengths if starts is None else starts
    lengths = lengths if valid is None else np.where(valid, lengths, 0)
    items = _taken(items, _ranges(starts, lengths))
    return ArrowChunk(name, len(lengths), valid, lengths=lengths, children=(items,))


def _ranges(starts: Any, lengths: Any) -> Any:
    """The integers [start, start + length) of each range, one range after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())


def _taken(chunk: ArrowChunk, items: Any) -> ArrowChunk:
    """The items of a chunk at some positions, int64 [length]: a copy."""
    lengths, indices = chunk.lengths, items
    if lengths is not None:
        indices = _ranges((np.cumsum(lengths, dtype=np.int64) - lengths)[items], lengths[items])
    valid = None if chunk.valid is None else chunk.valid[items]
    return replace(
        chunk,
        length=len(items),
        valid=None if valid is None or valid.all() else valid,
        values=None if chunk.values is None else chunk.values[items],
        lengths=None if lengths is None else lengths[items],
        children=(*(_taken(child, indices) for child in chunk.children),),
    )


def _children(schema: Any, piece: Any, start: int, length: int, owner: Any) -> Iterator[ArrowChunk]:
    for child in range(piece.n_children):
        yield _read(schema.children[child].contents, piece.children[child].contents, start, length, owner)


def _view(address: int | None, dtype: npt.DTypeLike, first: int, count: int, owner: Any) -> Array:
    """Numbers of a buffer, [count], from the number `first` on: a view."""
    dtype = np.dtype(dtype)
    if not count or address is None:
        return np.zeros(0, dtype)
    interface = {
        "data": (address + first * dtype.itemsize, True),
        "shape": (count,),
        "typestr": dtype.str,
        "version": 3,
    }
    return np.asarray(_Buffer(owner, interface))


def _bits(address: int | None, first: int, count: int, owner: Any) -> Mask:
    """Bits of a buffer, bool [count], from the bit `first` on."""
    byte, bit = divmod(first, 8)
    packed: Any = _view(address, np.uint8, byte, (bit + count + 7) // 8 if count else 0, owner)
    return np.unpackbits(packed, bitorder="little")[bit : bit + count].view(np.bool_)
