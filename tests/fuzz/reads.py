"""A model that takes dense inputs of every dtype, and whose scores are made of sequences; and the same in numpy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tests.fuzz.answers import Answer, Bags, Doubles, histories
from tests.fuzz.contract import Dense
from tests.support.history_model import sums

TYPED = {
    "price": Dense("FP32", (2, 2)),
    "relation": Dense("INT64", ()),
    "day": Dense("INT32", (1,)),
    "new": Dense("BOOL", (2,)),
    "year": Dense("INT16", ()),
    "zone": Dense("INT8", ()),
    "stars": Dense("UINT8", ()),
    "when": Dense("INT64", (), "recent"),
    "paid": Dense("FP32", (2,), "recent"),
}
# By name, with the shape of a sample; the last is by id of `recent`.
OUTPUTS: Mapping[str, tuple[int, ...]] = {
    "like": (),
    "attended": (32,),
    "first": (32,),
    "sent": (3,),
    "by_event": (2,),
}
JAGGED = (
    ("ROWS", "recent"),
    ("LENGTHS", "recent"),
    ("IDS", "recent"),
    ("ROWS", "seen"),
    ("LENGTHS", "genres"),
    ("IDS", "genres"),
    ("NUMBERS", "when"),
    ("NUMBERS", "paid"),
)
FIXED = {"seen": 2}
TOGETHER = ("words", "genres")


class Reads(nn.Module):
    """Each input is seen in the answer."""

    def forward(
        self,
        embeddings: Tensor,
        price: Tensor,
        relation: Tensor,
        day: Tensor,
        new: Tensor,
        year: Tensor,
        zone: Tensor,
        stars: Tensor,
        recent: Tensor,
        lengths: Tensor,
        ids: Tensor,
        history: Tensor,
        genres_lengths: Tensor,
        genres: Tensor,
        when: Tensor,
        paid: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        like = embeddings.sum(1) + price.sum([1, 2]) + relation % 11 + day.view(-1) % 13
        like = like + year % 17 + zone % 7 + stars % 5
        attended = sums(recent * (1 + ids % 3).unsqueeze(1), lengths) * torch.where(new[:, :1], 1.0, -1.0)
        first = history.view(lengths.numel(), 2, 32)[:, 0] * new[:, 1:].float()
        sent = [lengths.float(), genres_lengths.float(), sums(genres % 7, genres_lengths)]
        return like, attended, first, torch.stack(sent, dim=1), recent[:, :2] + paid * (when % 5).unsqueeze(1)

    @staticmethod
    def dense_answer(embeddings: Doubles, dense: Mapping[str, npt.NDArray[Any]], bags: Bags) -> Answer:
        """The same in numpy."""
        with np.errstate(invalid="ignore"):
            like = embeddings.sum(1) + dense["price"].sum((1, 2)) + dense["relation"] % 11 + dense["day"][:, 0] % 13
            like = like + dense["year"] % 17 + dense["zone"] % 7 + dense["stars"] % 5
        outputs = {name: np.zeros((bags.samples, *shape)) for name, shape in OUTPUTS.items()} | {"like": like}
        with np.errstate(invalid="ignore"):
            paid = dense["paid"] * (dense["when"] % 5)[:, np.newaxis]
        repeated = bags.samples if "recent" in bags.shared else 1
        events = [rows[:, :2] for _, rows in histories(bags, "recent")]
        outputs["by_event"] = np.concatenate([np.zeros((0, 2)), *events]) + np.tile(paid, (repeated, 1))
        every = zip(*(histories(bags, name) for name in ("recent", "seen", "genres")), strict=True)
        for sample, ((ids, recent), (_, history), (genres, _)) in enumerate(every):
            sign, flag = np.where(dense["new"][sample], (1.0, 1.0), (-1.0, 0.0))
            outputs["attended"][sample] = (recent * (1 + ids % 3)[:, np.newaxis]).sum(0) * sign
            outputs["first"][sample] = history[0] * flag
            outputs["sent"][sample] = [len(ids), len(genres), (genres % 7).sum()]
        return outputs
