"""Models of the answer: nested, empty in part, without a row for each sample, of other dtypes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.models.inputs import NamedModel, pooled_ids, positional
from tests.models.numbers import Pooled


class Nested(Pooled):
    """twitter's MaskNet and many tasks: a dict of dicts, a list among them, and None for what is off."""

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Any]:
        pooled = self.pooled(keyed)
        return {
            "click": {"logits": pooled[:, 0], "aux": None},
            "towers": [pooled[:, 1], {"wide": pooled}],
            "loss": None,
        }


class Squeezed(Pooled):
    """`.squeeze()` of everything: one sample has no dimension left."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        answer: Tensor = self.last(self.pooled(keyed)).squeeze()
        return answer


class Output(NamedTuple):
    logits: Tensor
    loss: Tensor | None


class Tupled(Pooled):
    """A NamedTuple with a part that is None."""

    def forward(self, keyed: KeyedJaggedTensor) -> Output:
        return Output(self.pooled(keyed), None)


@dataclass
class Outputs:
    logits: Tensor
    hidden: Tensor | None = None


class OfDataclass(Pooled):
    """Models of transformers' style: a dataclass of outputs."""

    def forward(self, keyed: KeyedJaggedTensor) -> Outputs:
        return Outputs(self.pooled(keyed).sum(dim=1, keepdim=True))


class Decisions(Pooled):
    """Answers that are no floats: the best class, and whether it is one."""

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
        pooled = self.pooled(keyed)
        return {"best": pooled.argmax(dim=1), "sure": pooled.amax(dim=1) > 1, "scores": pooled.softmax(dim=-1)}


class WithMean(Pooled):
    """GiGL and training wrappers: a loss that is a constant, or a mean of the batch, beside the scores."""

    def forward(self, keyed: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled = self.pooled(keyed)
        return torch.tensor(0.0), pooled.mean(), pooled


class Keyed(Pooled):
    """A KeyedTensor, as collections and DLRM's sparse part answer it."""

    def forward(self, keyed: KeyedJaggedTensor) -> Any:
        return self.bags(keyed)


class Matrices(Pooled):
    """MIND's towers: several vectors for each sample, normalized."""

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
        interests = self.bags(keyed).values().view(-1, 3, 8)
        return {"interests": nn.functional.normalize(interests, p=2.0, dim=-1)}


ANSWERS: dict[str, NamedModel] = {
    name: NamedModel(module, positional(pooled_ids))
    for name, module in {
        "nested_answer": Nested,
        "squeezed_answer": Squeezed,
        "named_tuple_answer": Tupled,
        "dataclass_answer": OfDataclass,
        "answers_of_other_dtypes": Decisions,
        "answers_without_samples": WithMean,
        "keyed_answer": Keyed,
        "matrices_answer": Matrices,
    }.items()
}
