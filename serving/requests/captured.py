"""The file of captured requests: slow and refused requests for replay, a line of JSON for each."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import numpy as np

from serving.bundle.tensor_names import LOOKED_UP
from serving.errors import ConfigurationError
from serving.files import UNREADABLE, open_file
from serving.requests.types import Array, Tensors

# The file beside config.pbtxt whose requests are answered before a model is ready.
# `tbe-serve configure --warm-up` makes it.
WARM_UP = "warm_up.jsonl"
# The largest such file that can be signed. Signing reads the whole file into memory.
MOST_WARM_UP_BYTES = 1 << 28
# The longest line that is read, in bytes. A request is shorter.
LONGEST_LINE = 1 << 28
# The dtypes of a dense input, little-endian, by field of `CapturedDense`.
_CAPTURED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool_": np.dtype(np.bool_),
}


_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class CapturedDense(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"bool_": "bool"},
):
    """A dense input of a captured request, bit for bit.

    Attributes:
        shape: as it was sent, [B, …].
        float32, int64, int32, int16, int8, uint8, bool_: the field of its dtype has its numbers, little-endian;
            base64 in the file.
    """

    shape: Annotated[tuple[_Size, ...], msgspec.Meta(min_length=1, max_length=31)]
    float32: bytes | None = None
    int64: bytes | None = None
    int32: bytes | None = None
    int16: bytes | None = None
    int8: bytes | None = None
    uint8: bytes | None = None
    bool_: bytes | None = None

    def __post_init__(self) -> None:
        names = [field.encode_name for field in msgspec.structs.fields(self) if getattr(self, field.name) is not None]
        if len(names) != 2:
            raise ValueError(f"expected a shape and the numbers of one dtype, got {', '.join(names)}")
        numbers, dtype = self._numbers
        if (expected := prod(self.shape) * dtype.itemsize) != len(numbers):
            raise ValueError(
                f"{names[1]}: expected {expected} bytes for shape {list(self.shape)}, got {len(numbers)}"
            )
        _ = self.array  # numpy refuses shapes that are too large, even if one size is 0

    @classmethod
    def of(cls, array: Array) -> Self:
        """Of an array [B, …]."""
        name = next(name for name, dtype in _CAPTURED.items() if dtype == array.dtype)
        return cls(shape=array.shape, **{name: array.astype(_CAPTURED[name]).tobytes()})

    @property
    def _numbers(self) -> tuple[bytes, np.dtype[Any]]:
        candidates = ((getattr(self, name), dtype) for name, dtype in _CAPTURED.items())
        return next((numbers, dtype) for numbers, dtype in candidates if numbers is not None)

    @property
    def array(self) -> Array:
        """[B, …]."""
        numbers, dtype = self._numbers
        return np.frombuffer(numbers, dtype).reshape(self.shape).astype(dtype.newbyteorder("="))


class CapturedRequest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"shared": "once"},
):
    """A line of the file. Weights are not captured; a replay sends a weight of 1 for each id.

    Attributes:
        at: when the request was answered, in ISO 8601.
        why: why it was captured: "slow: … ms" or "refused: …".
        features: the requested features, or None for all features of the model.
        tables: in place of features, the tables of a request for rows.
        values: ids, feature-major [N].
        lengths: bag sizes, feature-major [F·B].
        dense: the dense inputs by name.
        outputs: the requested outputs, or None for the outputs of a lookup.
        shared: the shared features and dense inputs.
        traceparent: the W3C trace context of the request, if it had one.
    """

    at: str
    why: str
    features: list[str] | None = None
    tables: list[str] | None = None
    values: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]
    lengths: list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]
    dense: dict[str, CapturedDense] = {}
    outputs: list[str] | None = None
    shared: list[str] = []
    traceparent: str | None = None

    @classmethod
    def of(cls, tensors: Tensors, at: str, why: str) -> Self:
        """Of a request; its weights are left out."""
        return cls(
            at=at,
            why=why,
            features=None if tensors.features is None else list(tensors.features),
            tables=None if tensors.tables is None else list(tensors.tables),
            values=tensors.values.tolist(),
            lengths=tensors.lengths.tolist(),
            dense={name: CapturedDense.of(array) for name, array in tensors.dense.items()},
            # Triton names them in any order.
            outputs=None if set(tensors.outputs) == set(LOOKED_UP) else sorted(tensors.outputs),
            shared=list(tensors.shared),
            traceparent=tensors.trace,
        )

    @property
    def tensors(self) -> Tensors:
        """The request as arrays, without weights."""
        values, lengths = np.array(self.values, np.int64), np.array(self.lengths, np.int32)
        return Tensors(
            self.features,
            values,
            lengths,
            outputs=LOOKED_UP if self.outputs is None else self.outputs,
            dense={name: numbers.array for name, numbers in self.dense.items()},
            tables=self.tables,
            shared=self.shared,
        )


@dataclass(slots=True)
class SkippedLines:
    """Counts the lines of a file that are not captured requests.

    Attributes:
        count: the number of these lines.
        first: the number of the first one, and what is wrong with it.
    """

    count: int = 0
    first: str = ""

    def add(self, number: int, problem: str) -> None:
        """Count line `number`."""
        self.first = self.first or f"line {number}: {problem}"
        self.count += 1

    def report(self, path: Path) -> Iterator[str]:
        """A line about the file, or nothing if all lines are requests."""
        if self.count:
            yield f"{path}: lines skipped, which are not captured requests: {self.count}; {self.first}"


def read_captured(
    path: Path, skipped: SkippedLines | None = None, *, follow: bool = False
) -> Iterator[CapturedRequest]:
    """Read captured requests one after the other. The file may be larger than memory.

    Lines that are not captured requests are skipped: clients influence what is captured.

    Args:
        path: a file that a recorder wrote.
        skipped: counts such lines.
        follow: whether `path` may be a link.

    Raises:
        ConfigurationError: the file cannot be read, or has lines but no captured request. The message names the first
            line.
    """
    decoder = msgspec.json.Decoder(CapturedRequest)
    skipped = SkippedLines() if skipped is None else skipped
    try:
        file = open_file(path, follow=follow)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    number = requests = 0
    with file:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                skipped.add(number, f"expected at most {LONGEST_LINE} bytes, got more")
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE)
            elif not line.isspace():
                try:
                    request = decoder.decode(line)
                except UNREADABLE as error:
                    skipped.add(number, f"expected a captured request: {error}")
                else:
                    requests += 1
                    yield request
    if skipped.count and not requests:
        raise ConfigurationError(f"{path}: {skipped.first}")
