"""The file of captured requests: slow and refused ones, kept for replay. A line is a request, in JSON."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from serving.errors import ConfigurationError
from serving.files.reading import open_file
from serving.files.strict import UNREADABLE
from serving.request.tensors import Tensors

# The file beside config.pbtxt whose requests are answered before a model is ready.
# `tbe-serve configure --warm-up` makes it.
WARM_UP = "warm_up.jsonl"
# The largest such file that can be signed. Signing reads the whole file into memory.
MOST_WARM_UP_BYTES = 1 << 28
# The longest line that is read. No request has so many ids.
LONGEST_LINE = 1 << 28


class CapturedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of the file. Weights are not captured: a replay sends a weight of 1 for each id.

    Attributes:
        at: when the request was answered, in ISO 8601.
        why: why it was captured: "slow: … ms" or "refused: …".
        features: the features asked for; None for all features of the model.
        tables: instead, the tables whose rows were asked for.
        values: ids, feature-major [N].
        lengths: bag sizes, feature-major [F·B].
        traceparent: the W3C trace context of the request, if it had one.
    """

    at: str
    why: str
    features: list[str] | None = None
    tables: list[str] | None = None
    values: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]
    lengths: list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]
    traceparent: str | None = None

    @property
    def tensors(self) -> Tensors:
        """The request as arrays, without weights."""
        values, lengths = np.array(self.values, np.int64), np.array(self.lengths, np.int32)
        return Tensors(self.features, values, lengths, tables=self.tables)


def read_captured(path: Path, *, follow: bool = False) -> Iterator[CapturedRequest]:
    """Read captured requests one after the other. The file may be larger than memory.

    Args:
        path: a file that a recorder wrote.
        follow: whether `path` may be a link.

    Raises:
        ConfigurationError: the file cannot be read, or a line, which the message names, is not a captured request.
    """
    decoder = msgspec.json.Decoder(CapturedRequest)
    try:
        file = open_file(path, follow=follow)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise ConfigurationError(f"{path}: line {number}: expected at most {LONGEST_LINE} bytes, got more")
            try:
                yield decoder.decode(line)
            except UNREADABLE as error:
                raise ConfigurationError(f"{path}: line {number}: expected a captured request: {error}") from error
