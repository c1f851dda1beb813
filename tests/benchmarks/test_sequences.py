"""Benchmarks of a ranker over a history: everyone is asked the same and answers it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peer_servers import HERE
from benchmarks.scored_workload import OUTPUT
from benchmarks.scores_sequences import ITEMS, _for_items
from benchmarks.sequences_model import DENSE, LONGEST, WIDTH
from benchmarks.sequences_workload import HISTORY, TARGET, SequencesWorkload
from serving.client import ModelInfo
from serving.engine import Engine

TOLERANCE = 0.1


@pytest.fixture(scope="module")
def workload() -> SequencesWorkload:
    return SequencesWorkload.make({1: 4, 16: 4}, rows=300)


@pytest.mark.long
def test_the_peer_model_and_the_engine_answer_the_same_scores(tmp_path: Path, workload: SequencesWorkload) -> None:
    sys.path.insert(0, str(HERE))
    from model import Model  # type: ignore[import-not-found]

    engine = Engine.open(workload.export(tmp_path / "repository"))
    keys: dict[str, tuple[str, ...]] = {f"f{n}": (f"f{n}",) for n in workload.tables.order}
    info = ModelInfo(dict.fromkeys(keys, 64), keys, (), np.dtype(np.float32), "", np.dtype(np.int64), frozenset(), {})
    workload.write(tmp_path / "rows", info)
    peer = Model(tmp_path / "rows", "int8")
    assert list(engine.bundle.manifest.keys) == list(keys)
    for samples in workload.tables.requests:
        saved = np.load(tmp_path / "rows" / f"requests_{samples}.npz")
        assert saved["dense"].shape[2] == WIDTH + 1
        for number, tensors in enumerate(workload.tensors(samples)):
            expected = workload.eager(tensors)
            assert expected.shape == (samples,)
            np.testing.assert_allclose(engine.outputs(tensors)[OUTPUT], expected, atol=TOLERANCE)
            scores = peer(saved["ids"][number], saved["dense"][number])
            np.testing.assert_allclose(scores[:, 0], expected, atol=TOLERANCE)
            if number == 0:
                np.testing.assert_array_equal(saved["answer"][:, 0], expected)
    # What would pass if nobody looked at the ids, or at the dense inputs.
    assert np.ptp(expected) > 10 * TOLERANCE


def test_the_padded_and_the_jagged_model_score_alike(workload: SequencesWorkload) -> None:
    padded, jagged = workload.model, workload.jagged()
    for tensors in workload.tensors(16):
        ids, dense = workload.kjt(tensors), workload.example()[1]
        np.testing.assert_allclose(padded(ids, dense).detach(), jagged(ids, dense).detach(), atol=1e-4)


def test_scores_depend_on_history_target_and_dense_inputs(workload: SequencesWorkload) -> None:
    tensors, other = workload.tensors(16)[:2]
    before = workload.eager(tensors)
    keys = [f"f{number}" for number in workload.tables.order]
    for key in (HISTORY, TARGET):
        first = keys.index(key) * 16
        start, end = tensors.lengths[:first].sum(), tensors.lengths[: first + 16].sum()
        values = tensors.values.astype(np.int64)
        values[start:end] = (values[start:end] + 7) % 300
        assert (
            np.abs(workload.eager(type(tensors)(None, values, tensors.lengths, dense=tensors.dense)) - before).max()
            > 0.1
        )
    changed = type(tensors)(None, tensors.values, tensors.lengths, dense=other.dense)
    assert np.abs(workload.eager(changed) - before).max() > 0.1
    lengths = tensors.lengths[keys.index(HISTORY) * 16 :][:16]
    assert 1 <= lengths.min() < lengths.max() <= LONGEST


def test_requests_for_500_items_share_or_repeat_the_user(workload: SequencesWorkload) -> None:
    keys = [f"f{number}" for number in workload.tables.order]
    (user, *_) = workload.tensors(1)
    shared, repeated = _for_items(user, keys, 0)
    assert TARGET not in shared.shared
    assert len(shared.shared) == len(keys) - 1
    assert repeated.lengths.size == len(keys) * ITEMS
    assert repeated.values.size == ITEMS * (shared.values.size - ITEMS) + ITEMS
    assert shared.dense[DENSE].shape == repeated.dense[DENSE].shape == (ITEMS, WIDTH)
    np.testing.assert_array_equal(shared.values[-ITEMS:], repeated.values[-ITEMS:])
