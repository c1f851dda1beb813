"""The dense part of a model in its bundle: the layers after the collections, which turn embeddings into scores."""

import enum
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from serving.bundle.tables import is_name
from serving.bundle.tensor_names import ID_INPUTS, LOOKED_UP
from serving.files import Strict

# The file of a bundle with the dense part as TorchScript, with its weights.
SCORES = "scores.pt"
# The same as an exported program.
EXPORTED_SCORES = "scores.pt2"
# The names of all files with the dense part match this.
SCORES_FILES = re.compile(r"scores(\.[A-Za-z0-9_-]+)+")
# The files with the programs for many items of one user, as TorchScript.
USER_PROGRAM, ITEMS_PROGRAM = "scores.user.pt", "scores.items.pt"
# The file in the archive `USER_PROGRAM` with the `names` of the user side that it was compiled for, JSON.
USER_SIDE_NAMES = "names"
# Names of other tensors in requests and answers.
RESERVED = (*ID_INPUTS, *LOOKED_UP)


class DenseDtype(enum.Enum):
    """The dtype of a dense part's weights. INT8 quantizes the weights of nn.Linear, and its inputs dynamically."""

    FP32 = "FP32"
    BF16 = "BF16"
    INT8 = "INT8"


class DenseCompiler(enum.Enum):
    """The compiler of the dense part to native code. AOTI: AOTInductor, for x86-64-v3."""

    AOTI = "AOTI"


class DenseFormat(enum.Enum):
    """The writer of a file with the dense part.

    TORCHSCRIPT: `torch.jit.save`.
    EXPORTED_PROGRAM: `torch.export.save`.
    AOTINDUCTOR: AOTInductor, as native code.
    """

    TORCHSCRIPT = "TORCHSCRIPT"
    EXPORTED_PROGRAM = "EXPORTED_PROGRAM"
    AOTINDUCTOR = "AOTINDUCTOR"


class DenseFile(Strict, frozen=True, omit_defaults=True):
    """A file of the bundle with the whole dense part. All such files answer alike.

    Attributes:
        name: the name of the file.
        relative_time: the time of a call divided by that of the first file, as measured by the export. None: there is
            only one file.
        instructions: for AOTINDUCTOR, the instruction set that the code needs, such as x86-64-v3.
        torch: for AOTINDUCTOR, the release of torch that the code runs with, as `torch.__version__`.
    """

    name: str
    format: DenseFormat
    relative_time: float | None = None
    instructions: str | None = None
    torch: str | None = None


class InputDtype(enum.Enum):
    """The dtype of a dense input, by its KServe name."""

    FP32 = "FP32"
    INT64 = "INT64"
    INT32 = "INT32"
    INT16 = "INT16"
    INT8 = "INT8"
    UINT8 = "UINT8"
    BOOL = "BOOL"

    @cached_property  # an enum's hash takes as long as a comparison of arrays
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype."""
        return _NUMPY[self]

    @property
    def is_integer(self) -> bool:
        """Whether it is a dtype of integers; BOOL is not."""
        return self.numpy.kind in "iu"


class ScoreDtype(enum.Enum):
    """The dtype of a score, by its KServe name: the dtype of the model's output, or FP32 for FP16 and BF16."""

    FP32 = "FP32"
    FP64 = "FP64"
    INT64 = "INT64"
    INT32 = "INT32"
    INT16 = "INT16"
    INT8 = "INT8"
    UINT8 = "UINT8"
    BOOL = "BOOL"

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype."""
        return np.dtype(np.float64) if self is ScoreDtype.FP64 else InputDtype(self.value).numpy


_NUMPY: dict[InputDtype, np.dtype[Any]] = {
    InputDtype.FP32: np.dtype(np.float32),
    InputDtype.INT64: np.dtype(np.int64),
    InputDtype.INT32: np.dtype(np.int32),
    InputDtype.INT16: np.dtype(np.int16),
    InputDtype.INT8: np.dtype(np.int8),
    InputDtype.UINT8: np.dtype(np.uint8),
    InputDtype.BOOL: np.dtype(np.bool_),
}
# The dtypes that a dense input may have.
INPUT_DTYPES = {numpy: dtype for dtype, numpy in _NUMPY.items()}
# The dtypes that a score may have.
SCORE_DTYPES = {dtype.numpy: dtype for dtype in ScoreDtype}


class DenseInput(Strict, frozen=True, omit_defaults=True):
    """An input of the dense part beside the embeddings: [B, *shape]; or, with a key, [n, *shape].

    Attributes:
        name: the argument of the model's forward, or its path in an example input, such as `batch.dense_features`.
        shape: the shape of one sample, or of one id. () is one number.
        rows: the integers index an embedding in the dense part, and must be in [0, rows). None: any number is valid.
        key: the input has a row for each of the n ids of this key, in their order. None: a row for each sample.
    """

    name: str
    shape: tuple[int, ...]
    dtype: InputDtype = InputDtype.FP32
    rows: int | None = None
    key: str | None = None

    @property
    def schema(self) -> list[object]:
        """What a client can see of the input. FP32 [B, width] has a short form, which keeps old digests valid."""
        if self.dtype is InputDtype.FP32 and len(self.shape) == 1 and self.key is None:
            return [self.name, *self.shape]
        return [self.name, self.shape, self.dtype.value, *([] if self.key is None else [self.key])]


class JaggedKind(enum.Enum):
    """The content of a jagged input.

    ROWS: the rows that were looked up for a feature that is not pooled, [n, dim], in the bundle's output dtype.
    NUMBERS: a dense input with a row for each id of a key, [n, *shape].
    LENGTHS, IDS, WEIGHTS: as in the request, the lengths of a key, int32 [B], its ids, int64 [n], or the weights of
    these, float32 [n].
    """

    ROWS = "ROWS"
    NUMBERS = "NUMBERS"
    LENGTHS = "LENGTHS"
    IDS = "IDS"
    WEIGHTS = "WEIGHTS"


class JaggedInput(Strict, frozen=True):
    """An input of the dense part that is made of the ids of a request, or has a row for each of them.

    Attributes:
        name: for ROWS, a feature that is not pooled; for NUMBERS, a dense input; for the other kinds, a key.
    """

    kind: JaggedKind
    name: str


class LabelledAuc(Strict, frozen=True, omit_defaults=True):
    """The area under the ROC curve of one output, on samples with labels.

    Attributes:
        samples: the number of samples.
        served: the AUC of the served program, with the stored rows.
        trained: the AUC of the unchanged trained model, or None if it could not be run.
    """

    samples: int
    served: float
    trained: float | None = None


class ScoreParity(Strict, frozen=True, omit_defaults=True):
    """How far the numbers of one output moved, on a probe.

    Attributes:
        scale: the largest |score| of the dense part before it is compiled.
        scripted: the largest |difference| between the dense part before it is compiled, in FP32, and the served one.
        merged: the largest |difference| between requests that are answered together and each answered alone.
        trained: the largest |difference| between the unchanged trained model and the served program with the stored
            rows. None: the trained model could not be run.
        trained_mean: the mean of that |difference|.
        auc: the AUC on samples with labels, or None if the export got no labels for this output.
    """

    scale: float
    scripted: float
    merged: float
    trained: float | None = None
    trained_mean: float | None = None
    auc: LabelledAuc | None = None


class ScoreOutput(Strict, frozen=True, omit_defaults=True):
    """An output of the dense part: [B, *shape]; or, with a key, [n, *shape].

    Attributes:
        shape: the shape of one sample, or of one id. () is one number.
        key: the output has a row for each of the n ids of this key, in their order. None: a row for each sample.
    """

    name: str
    shape: tuple[int, ...]
    parity: ScoreParity
    key: str | None = None
    dtype: ScoreDtype = ScoreDtype.FP32

    @property
    def schema(self) -> list[object]:
        """What a client can see of the output. FP32 is left out, which keeps old digests valid."""
        dtype = [] if self.dtype is ScoreDtype.FP32 else [[self.dtype.value]]
        return [self.name, self.shape, *([] if self.key is None else [self.key]), *dtype]


class UserSide(Strict, frozen=True):
    """The inputs that all items of a ranking request share, and how much of the dense part depends on them alone.

    Attributes:
        names: the keys and dense inputs that the items share. The programs `USER_PROGRAM` and `ITEMS_PROGRAM` score a
            request that sends exactly these once.
        per_user: the number of operators of the dense part that are computed once for the user, at least in part.
        operators: the number of operators of the dense part.
        left_alone: the operators that repeat the user's rows for each item, with their lines in the model, in words.
        fewest_items: the programs score requests with this number of items or more. The export measured that the
            whole dense part is not faster for them. None: it is faster, and scores all requests.
    """

    names: tuple[str, ...]
    per_user: int
    operators: int
    left_alone: tuple[str, ...] = ()
    fewest_items: int | None = None

    def scores(self, items: int) -> bool:
        """Whether the programs score a request that sends the user once."""
        return self.fewest_items is not None and items >= self.fewest_items

    @property
    def lines(self) -> list[str]:
        """Lines for people: what is computed once, from how many items on, and what repeats the user's rows."""
        share = f"{self.per_user} of {self.operators} operators of the dense part"
        if self.fewest_items is None:
            use = "never used: with all numbers of items that the export measured, the whole dense part is faster"
        else:
            use = f"used for requests of {self.fewest_items} items or more, as the export measured"
        return [
            f"user side: {', '.join(self.names)}: {share} are computed once, in whole or in part",
            f"user side: {use}",
            *(f"user side: rows of the user are repeated for each item in {line}" for line in self.left_alone),
        ]


class DensePart(Strict, frozen=True, omit_defaults=True):
    """The dense part: the layers of a model after its collections.

    Attributes:
        inputs: the inputs beside the embeddings. The program takes the inputs with a row for each sample in this
            order, and then `jagged` with all others.
        outputs: the outputs in the order of an answer.
        dtype: the dtype of its weights.
        mixes_samples: whether the scores of a sample may depend on the other samples of its request. If so, requests
            are not scored together.
        mixed_by: the operator that may mix samples, and its line in the model, in words. None: samples are not
            mixed, or an earlier tbe-serving exported the bundle.
        is_own: whether it is a separate module of the user instead of the trained model's layers.
        jagged: the inputs that have rows for ids, or are made of ids.
        fixed_lengths: the number of ids in each bag of a key, in requests for scores.
        together: groups of keys that have equally many ids in each sample, in requests for scores: the model places
            their rows side by side.
        files: the files with the dense part, the fastest first. If it is empty, the file is `scores.pt`, as
            TorchScript.
        user_side: the inputs that the items of a ranking request share. None: the bundle has no programs for this.
    """

    inputs: tuple[DenseInput, ...]
    outputs: tuple[ScoreOutput, ...]
    dtype: DenseDtype
    mixes_samples: bool
    mixed_by: str | None = None
    is_own: bool = False
    jagged: tuple[JaggedInput, ...] = ()
    fixed_lengths: dict[str, int] = msgspec.field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    files: tuple[DenseFile, ...] = ()
    user_side: UserSide | None = None

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files of a bundle with this dense part."""
        names = tuple(file.name for file in self.files_by_speed)
        return names if self.user_side is None else (*names, USER_PROGRAM, ITEMS_PROGRAM)

    def arguments_of(self, names: Collection[str], keys: Mapping[str, str]) -> list[int]:
        """The positions of the arguments of some keys and dense inputs, counted without the embeddings.

        Args:
            names: the keys and dense inputs.
            keys: the key of each feature.
        """
        arguments = [tensor.name for tensor in self.by_sample]
        arguments += [self.key_of(jagged, keys) for jagged in self.jagged]
        return [number for number, name in enumerate(arguments) if name in names]

    @property
    def files_by_speed(self) -> tuple[DenseFile, ...]:
        """The files with the dense part, in the order in which a reader tries them."""
        return self.files or (DenseFile(SCORES, DenseFormat.TORCHSCRIPT),)

    @property
    def by_sample(self) -> tuple[DenseInput, ...]:
        """The inputs with a row for each sample."""
        return tuple(tensor for tensor in self.inputs if tensor.key is None)

    @property
    def by_id(self) -> dict[str, str]:
        """The inputs with a row for each id, and the key of each."""
        return {tensor.name: tensor.key for tensor in self.inputs if tensor.key is not None}

    def key_of(self, jagged: JaggedInput, keys: Mapping[str, str]) -> str:
        """The key whose ids a jagged input is made of.

        Args:
            jagged: the input.
            keys: the key of each feature.
        """
        if jagged.kind is JaggedKind.ROWS:
            return keys[jagged.name]
        return self.by_id[jagged.name] if jagged.kind is JaggedKind.NUMBERS else jagged.name

    @property
    def schema(self) -> list[object]:
        """What a client can see: names, shapes and dtypes of inputs and outputs, and rules for lengths."""
        inputs = [tensor.schema for tensor in self.inputs]
        outputs = [output.schema for output in self.outputs]
        fixed = [sorted(self.fixed_lengths.items())] if self.fixed_lengths or self.together else []
        return [inputs, outputs, *fixed, *([self.together] if self.together else [])]


def wrong_names(inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[str]:
    """A line for each unusable name of a dense part's inputs and outputs."""
    for kind, names in (("input", inputs), ("output", outputs)):
        for name in names:
            if not is_name(name) or name in RESERVED or names.count(name) > 1:
                yield (
                    f"dense {kind} {name!r}: expected a name of its own, without commas and control characters, and "
                    f"none of {', '.join(RESERVED)}: rename it in the model's forward"
                )
