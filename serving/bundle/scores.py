"""The dense part of a model in its bundle: what follows the collections, and turns pooled embeddings into scores."""

import enum
from collections.abc import Iterator, Sequence

from serving.bundle.tables import is_name
from serving.files.strict import Strict

# The file of a bundle with the dense part: TorchScript, its weights among it.
SCORES = "scores.pt"
# What requests and answers call other things by.
RESERVED = ("values", "lengths", "weights", "embeddings", "sequences", "once")


class DenseDtype(enum.Enum):
    """How the weights of a dense part are kept. INT8 quantizes those of nn.Linear, and inputs as they come."""

    FP32 = "FP32"
    BF16 = "BF16"
    INT8 = "INT8"


class DenseInput(Strict, frozen=True):
    """An input of the dense part beside the embeddings: FP32 [B, width].

    Attributes:
        name: the argument of the model's forward.
    """

    name: str
    width: int


class LabelledAuc(Strict, frozen=True, omit_defaults=True):
    """The area under the ROC curve of one output, on samples with labels.

    Attributes:
        samples: how many.
        served: of what serves, from the stored rows.
        trained: of the trained model as it is. None: it could not be run.
    """

    samples: int
    served: float
    trained: float | None = None


class ScoreParity(Strict, frozen=True, omit_defaults=True):
    """How far the numbers of one output moved, on a probe.

    Attributes:
        scale: the largest |score| that the dense part answers with, before it is compiled.
        scripted: the largest |difference| between the dense part before it is compiled, FP32, and what serves.
        merged: the largest |difference| between requests answered together and each answered alone.
        trained: the largest |difference| between the trained model as it is, and what serves, from the stored rows.
            None: the trained model could not be run.
        trained_mean: the mean of that |difference|.
        auc: on samples with labels; None: the export was given none for this output.
    """

    scale: float
    scripted: float
    merged: float
    trained: float | None = None
    trained_mean: float | None = None
    auc: LabelledAuc | None = None


class ScoreOutput(Strict, frozen=True, omit_defaults=True):
    """An output of the dense part: FP32 [B, *shape].

    Attributes:
        shape: of one sample; () for one number.
    """

    name: str
    shape: tuple[int, ...]
    parity: ScoreParity


class DensePart(Strict, frozen=True, omit_defaults=True):
    """What follows the collections of a model.

    Attributes:
        inputs: beside the embeddings, in the order of the model's forward.
        outputs: in the order of an answer.
        dtype: of its weights.
        mixes_samples: whether the scores of a sample may depend on the other samples of its request. Then requests
            are not scored together.
        mixed_by: what samples may meet in: an operator and the line of the model, in words. None: nothing, or an
            earlier tbe-serving exported the bundle.
        is_own: whether it is a module of the user's, in place of what follows the collections of the trained model.
    """

    inputs: tuple[DenseInput, ...]
    outputs: tuple[ScoreOutput, ...]
    dtype: DenseDtype
    mixes_samples: bool
    mixed_by: str | None = None
    is_own: bool = False

    @property
    def contract(self) -> list[object]:
        """What a client can see of it."""
        return [[[each.name, each.width] for each in self.inputs], [[each.name, each.shape] for each in self.outputs]]


def wrong_names(inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[str]:
    """What is wrong with the names of a dense part's inputs and outputs, a line each."""
    for kind, names in (("input", inputs), ("output", outputs)):
        for name in names:
            if not is_name(name) or name in RESERVED or names.count(name) > 1:
                yield (
                    f"dense {kind} {name!r}: expected a name of its own, without commas and control characters, and "
                    f"none of {', '.join(RESERVED)}: rename it in the model's forward"
                )
