"""What torch.export decides as it is for the example, and what is otherwise for other requests: nothing is served wrong.

Each forward here was served with wrong numbers once, but for those that are right.
"""

import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from export import export_model
from export.errors import ModelError, ParityError
from serving.engine import Engine
from serving.requests.encoding import encode
from tests.support.long_cases import one_in
from tests.support.merged_answers import merged_answers
from tests.support.models import Spec, collection
from tests.support.module_calls import assert_served
from tests.support.scored_models import EXACT

DIM, LONGEST = 8, 6
SAME = [[1, 2, 3], [4], [], [5, 6], [7], [8]]
EVERY_THIRD = [[1, 2, 3], [4, 5, 6], [], [5, 6, 7], [7, 8, 9], [8, 9, 1]]
LONG = [[1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9], [5, 1, 2, 3, 4], [5, 6, 7, 8, 9, 1], [7, 1, 2, 3, 4], [8, 1, 2, 3, 4]]


def keyed(**bags: list[list[int]]) -> KeyedJaggedTensor:
    values = torch.tensor([value for bag in bags.values() for sample in bag for value in sample], dtype=torch.int64)
    lengths = torch.tensor([len(sample) for bag in bags.values() for sample in bag], dtype=torch.int32)
    return KeyedJaggedTensor(list(bags), values, lengths=lengths)


class Rows(nn.Module):
    def __init__(self, keys: tuple[str, ...] = ("s",)) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=f"t_{key}", num_embeddings=40, embedding_dim=DIM, feature_names=[key])
            for key in keys
        ]
        self.rows = EmbeddingCollection(tables=tables)

    def padded(self, ids: KeyedJaggedTensor, key: str = "s") -> tuple[Tensor, Tensor]:
        rows = self.rows(ids)[key]
        return rows.values(), rows.to_padded_dense(LONGEST).sum((1, 2))


class OneId(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        values, sums = self.padded(ids)
        return sums * 2 if values.size(0) == 1 else sums


class Multiple(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        values, sums = self.padded(ids)
        return sums * 2 if values.size(0) % 3 == 0 else sums


class Squeezed(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        values, sums = self.padded(ids)
        return sums + (1.0 if values.squeeze().dim() == 1 else 0.0)


class SameTotal(Rows):
    def __init__(self) -> None:
        super().__init__(("s", "u"))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        (history, one), (used, other) = self.padded(ids), self.padded(ids, "u")
        return (one + other) * 2 if history.size(0) == used.size(0) else one + other


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = collection((Spec("a", 40, DIM, "SUM", ("a",)),))

    def total(self, ids: KeyedJaggedTensor) -> Tensor:
        total: Tensor = self.bags(ids).values().sum(1)
        return total


class Swallows(Scored):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        try:
            special = bool((kind == 7).any())
        except Exception:
            special = False
        return self.total(ids) * (3 if special else 1) + kind


class Guarded(Scored):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool((kind == 7).any()):
            return self.total(ids) * 3 + kind
        return self.total(ids) + kind


class Clock(Scored):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.total(ids) + time.time() / 1e6 - kind


class Dated(Scored):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.total(ids) + datetime.now().second - kind


class OfNumpy(Scored):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.total(ids) + int(np.datetime64("now", "h").astype(int) % 24) - kind


class HeldClock(Scored):
    clock = staticmethod(time.time)

    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.total(ids) + self.clock() // 86400 - kind


class Cutoff(Scored):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.total(ids) * (2 if time.time() > BEGAN + 30 * 86400 else 1) - kind


class Elapsed(Scored):
    def forward(self, ids: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        return self.total(ids) + int(time.monotonic()) // 10 % 1000 - kind


class Encoded(Scored):
    """Answers at padding, too, where the fast path of torch gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(20, DIM), nn.TransformerEncoder(layer, 1)

    def states(self, tokens: Tensor, missing: Tensor) -> Tensor:
        states: Tensor = self.encoder(self.embedding(tokens), src_key_padding_mask=missing)
        return states[..., 0].sum(1)


class PaddedByZeros(Encoded):
    def forward(self, ids: KeyedJaggedTensor, tokens: Tensor) -> Tensor:
        return self.total(ids) + self.states(tokens, tokens == 0)


class PaddedByMask(Encoded):
    def forward(self, ids: KeyedJaggedTensor, tokens: Tensor, missing: Tensor) -> Tensor:
        return self.total(ids) + self.states(tokens, missing)


A, TOKENS = {"a": [[1]] * 6}, torch.arange(1, 19).view(6, 3)
OF_IDS, AT_PADDING = "depends on the number of ids at .*test_decisions.py, line", "as padding does"
BEGAN = time.time()
ASKS = "reads the time at .*test_decisions.py, line .*: expected it as a dense input"
WRONG: list[tuple[type[Any], tuple[Any, ...], str]] = [
    (OneId, (keyed(s=SAME),), OF_IDS),
    (Multiple, (keyed(s=EVERY_THIRD),), OF_IDS),
    (Squeezed, (keyed(s=SAME),), OF_IDS),
    (SameTotal, (keyed(s=SAME, u=SAME),), OF_IDS),
    (Swallows, (keyed(**A), torch.arange(6)), "cannot be traced at .*test_decisions.py, line .*: `special = "),
    (Guarded, (keyed(**A), torch.arange(6)), "depends on numbers of the request at .*test_decisions.py, line"),
    *((kind, (keyed(**A), torch.arange(6)), ASKS) for kind in (Clock, Cutoff, Dated, OfNumpy, HeldClock, Elapsed)),
    (PaddedByZeros, (keyed(**A), TOKENS), AT_PADDING),
    (PaddedByMask, (keyed(**A), TOKENS, torch.zeros(6, 3, dtype=torch.bool)), AT_PADDING),
]


@pytest.mark.promise(
    "A forward that changes with the number of ids, over time or with padding is refused at export with its line"
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kind", "example", "why"), one_in(3, [pytest.param(*case, id=case[0].__name__) for case in WRONG])
)
def test_forwards_that_change_with_the_request_are_refused(
    kind: type[Any], example: tuple[Any, ...], why: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with pytest.raises((ModelError, ParityError), match=why):
        export_model(kind().eval(), tmp_path / "r", "m", EXACT, example=example)
    assert not (tmp_path / "r" / "m").exists()


@pytest.mark.promise(
    "A forward that changes with the number of ids, over time or with padding is refused at export with its line"
)
def test_a_step_on_a_capped_number_of_ids_prevents_merging(tmp_path: Path) -> None:
    """Whatever the example's samples have: it was read of more ids than the limit alone."""
    torch.manual_seed(0)
    model = Capped().eval()
    bundle = export_model(model, tmp_path / "r", "m", EXACT, example=(keyed(s=LONG),))
    bags_by_request = [[[3]], [[4, 5]], [[1, 2, 3, 4, 5, 6]]]
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert part.mixed_by == "a step that depends on the number of ids"
    requests = [replace(encode({"s": bags}, []), outputs=["scores"]) for bags in bags_by_request]
    for bags, result in zip(bags_by_request, merged_answers(bundle, requests), strict=True):
        with torch.no_grad():
            expected = model(keyed(s=bags))
        np.testing.assert_allclose(result["scores"], expected.numpy(), atol=1e-6)


class Capped(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        values, sums = self.padded(ids)
        return sums / min(values.size(0), 5)


class Asking(Rows):
    """Asks in ways that change no answer: of ids that have to be there, for its log, and to refuse what cannot be."""

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        values, sums = self.padded(ids)
        if values.size(0) == 0:
            return torch.zeros_like(sums)
        if values.size(0) == 1:
            self.log = "one"
        if values.size(1) * values.size(0) != values.numel():
            raise ValueError("it cannot be")
        return sums + 0 * sums.to(torch.float32, copy=True).add_(1)


def test_branches_that_change_no_answer_are_served(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Asking().eval()
    bundle = export_model(model, tmp_path / "r", "m", EXACT, example=(keyed(s=SAME),))
    with Engine.open(bundle) as engine:
        requests: list[list[list[int]]] = [[[3]], [[], []], SAME, [[1, 2], []]]
        for bags in requests:
            with torch.no_grad():
                expected = model(keyed(s=bags))
            np.testing.assert_allclose(engine.score({"s": bags})["scores"], expected.numpy(), atol=1e-6)


class Counting(Scored):
    calls = 0

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.calls += 1
        return self.total(ids) * (1 if self.calls <= 200 else 2)


class Remembering(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.seen.append(1)
        return self.total(ids) * (1 + len(self.seen) // 300)


class Tally:
    def __init__(self) -> None:
        self.calls = 0


class OfObject(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.tally = {"of": [Tally()]}

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        tally = self.tally["of"][0]
        tally.calls += 1
        return self.total(ids) * (1 if tally.calls <= 200 else 2)


class OfClass(Scored):
    total_calls = 0

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        OfClass.total_calls += 1
        return self.total(ids) * (1 if OfClass.total_calls <= 200 else 2)


class OfSet(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.requests: set[object] = set()

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.requests.add(object())
        return self.total(ids) * (1 if len(self.requests) <= 200 else 2)


class Slots:
    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = 0


class OfSlots(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.slots.asked += 1
        return self.total(ids) * (1 if self.slots.asked <= 200_000 else 2)


def tick(counts: list[int] = [0]) -> int:  # noqa: B006  as it is written by mistake
    counts[0] += 1
    return counts[0]


class OfDefault(Scored):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.total(ids) * (1 if tick() <= 200 else 2)


def ask() -> int:
    ask.times = getattr(ask, "times", 0) + 1  # type: ignore[attr-defined]
    return int(ask.times)  # type: ignore[attr-defined]


class OfFunction(Scored):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.total(ids) * (1 if ask() <= 200_000_000 else 2)


CALLS = {"all": 0}


class OfFile(Scored):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        CALLS["all"] += 1
        return self.total(ids) * (1 if CALLS["all"] <= 200 else 2)


class EverySecond(Scored):
    is_odd = False

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.is_odd = not self.is_odd
        return self.total(ids)


class Logging(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return self.total(ids)


EXAMPLES = pytest.mark.parametrize(
    "example", one_in(2, [None, ((keyed(**A),),)]), ids=["without an example", "with one"]
)
COUNTS: tuple[tuple[type[Scored], str], ...] = (
    (Counting, "calls"),
    (Remembering, "seen"),
    (OfObject, "calls"),
    (OfClass, "total_calls"),
    (OfSet, "requests"),
    (OfFile, "all"),
    (OfSlots, "asked"),
    (OfDefault, "a number that it keeps"),
    (OfFunction, "times"),
)


@EXAMPLES
@pytest.mark.parametrize(("kind", "name"), one_in(3, COUNTS))
def test_a_model_that_answers_by_its_call_count_is_refused(
    kind: type[Scored], name: str, example: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"{kind.__name__}: its forward changes '?{name}'?, and answers by it"):
        export_model(kind().eval(), tmp_path / "r", "m", EXACT, example=example)
    assert OfClass.total_calls < 1_000, "what others have, too, is as it was"
    assert [*CALLS] == ["all"]
    assert CALLS["all"] < 1_000


@EXAMPLES
@pytest.mark.parametrize("kind", [Logging, EverySecond])
def test_a_model_that_counts_calls_without_effect_is_exported(
    kind: type[Scored], example: Any, tmp_path: Path
) -> None:
    module, call = kind().eval(), (keyed(**A),)
    assert_served(export_model(module, tmp_path / "r", "m", EXACT, example=example), module, call)


class WithoutExample(Scored):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.total(ids) * (datetime.now().year - 2000)


def test_a_clock_is_noticed_without_an_example(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=ASKS):
        export_model(WithoutExample().eval(), tmp_path / "r", "m", EXACT)
