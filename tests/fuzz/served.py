"""What is fuzzed, and what it has to answer: a whole model with every id policy, raw ids and scores, one whose samples
would meet if requests were scored together, one of sequences, and one whose scores are made of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
from torch import nn

from export import ExportConfig, IdPolicy, WeightDtype, export_model
from serving.bundle.scores import DenseInput, DensePart, InputDtype, JaggedInput, JaggedKind
from serving.bundle.tables import DefaultRow
from serving.model.settings import ServingSettings
from tests.fuzz.answers import Feature
from tests.fuzz.contract import Dense, Model, Scores
from tests.fuzz.reads import FIXED, JAGGED, OUTPUTS, TOGETHER, TYPED, Reads
from tests.support.handwritten_dense_part import with_dense_part
from tests.support.models import MIXED, Spec, float_tables
from tests.support.mutable_tables import changing_nothing
from tests.support.raw_id_ranker import DENSE, RAW, Meeting, Whole
from tests.support.sequence_models import POOLED, ROWS, Mixed

MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES = 50_000, 5_000, 500_000
PLAIN: dict[str, str | int] = {"user": "error", "item": "zero", "genre": "modulo", "word": 3}


@contextmanager
def deltas(repository: Path, models: Sequence[Model]) -> Iterator[None]:
    """In the block, the rows of all are written all the time, as they are."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(changing_nothing(repository / model.name / model.version))
        yield


def publish(repository: Path) -> list[Model]:
    """Export all into `repository`, their rows as they are (FP32), to be served live."""
    return [
        _whole(repository, "m", Whole()),
        _whole(repository, "meets", Meeting()),
        _of_sequences(repository, "rows"),
        _that_reads(repository),
    ]


def _config() -> ExportConfig:
    policies: dict[str | int, IdPolicy | DefaultRow] = {
        "zero": IdPolicy.ZERO,
        "modulo": IdPolicy.MODULO,
        3: DefaultRow(default_row=3),
    }
    return ExportConfig(
        dtype={"*": WeightDtype.FP32},
        id_policy={table: policies[what] for table, what in PLAIN.items() if what in policies},
        serving=ServingSettings(
            max_request_ids=MOST_IDS,
            max_request_samples=MOST_SAMPLES,
            max_sequence_bytes=MOST_SEQUENCE_BYTES,
            max_busy_ms=60_000,
            weights_memory="live",
        ),
    )


def _whole(repository: Path, name: str, module: Whole) -> Model:
    module = module.eval()
    bundle = export_model(module, repository, name, replace(_config(), scores=True))
    state = module.raw._managed_collision_collection._managed_collision_modules["raw"].state_dict()
    raw_ids, rows = (state[key].tolist() for key in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    # The first of equal ids counts.
    row_by_id = dict(zip(raw_ids[::-1], rows[::-1], strict=True))
    features = _features((*MIXED, RAW), module, {**PLAIN, "raw": row_by_id})
    dense = {name: Dense("FP32", (width,)) for name, width in DENSE.items()}
    scores = Scores(dense, ("like", "both"), lambda embeddings, dense, _: module.dense_answer(embeddings, dense))
    return Model(name, bundle.name, features, MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES, scores)


def _of_sequences(repository: Path, name: str) -> Model:
    module = Mixed()
    bundle = export_model(module, repository, name, _config())
    features = _features((*POOLED, *ROWS), module, PLAIN)
    return Model(name, bundle.name, features, MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES)


def _that_reads(repository: Path) -> Model:
    """`reads` has inputs of every dtype, and scores that are made of sequences."""
    model = _of_sequences(repository, "reads")
    jagged = tuple(JaggedInput(JaggedKind(kind), name) for kind, name in JAGGED)
    inputs = [
        DenseInput(name, value.shape, InputDtype(value.datatype), key=value.key) for name, value in TYPED.items()
    ]

    def said(part: DensePart) -> DensePart:
        *rest, by_event = part.outputs
        outputs = (*rest, msgspec.structs.replace(by_event, key="recent"))
        return msgspec.structs.replace(
            part, outputs=outputs, jagged=jagged, fixed_lengths=FIXED, together=(TOGETHER,)
        )

    with_dense_part(repository / "reads" / model.version, Reads(), inputs, OUTPUTS, said)
    return replace(model, scores=Scores(TYPED, tuple(OUTPUTS), Reads.dense_answer, JAGGED, FIXED, TOGETHER))


def _features(
    specs: Sequence[Spec], module: nn.Module, outside: Mapping[str, str | int | Mapping[int, int]]
) -> dict[str, Feature]:
    tables = float_tables(module)
    return {
        feature: Feature(
            spec.name, tables[spec.name], spec.pooling == "MEAN", outside[spec.name], spec.pooling == "NONE"
        )
        for spec in specs
        for feature in spec.features
    }
