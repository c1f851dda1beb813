"""Rankings that are measured: every candidate scores the same items of the same user."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import rankings_workload
from benchmarks.peer_servers import HERE
from benchmarks.rankings_workload import KINDS, OUTPUT, RankingsWorkload
from serving.engine import Engine
from serving.torchscript import torchscript


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_ours_and_peers_answer_as_the_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankings_workload, "ROWS", 300)
    monkeypatch.setattr(rankings_workload, "ITEMS", 40)
    monkeypatch.setattr(rankings_workload, "REQUESTS", 2)
    monkeypatch.syspath_prepend(str(HERE))
    from model import Model  # type: ignore[import-not-found]

    workload = RankingsWorkload.make(kind)
    right = workload.answer(1)
    close = 0.3 * right.std()  # rows have 8 bits
    assert np.abs(right - workload.answer(0)).max() > close
    with Engine.open(workload.export(tmp_path / "r")) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert part.user_side is not None
        answers = [engine.outputs(workload.tensors(repeated=repeated)[1])[OUTPUT] for repeated in (False, True)]
    for repeated in (False, True):
        workload.write(tmp_path / str(repeated), repeated=repeated)
        with torchscript():
            peer = Model(tmp_path / str(repeated), "int8")
            answers.append(peer(**workload.arrays(repeated=repeated)[1]))
    for answer in answers:
        np.testing.assert_allclose(answer.reshape(-1, 1), right, rtol=0, atol=close)
    bytes_once, bytes_repeated = (
        sum(array.nbytes for array in workload.arrays(repeated=repeated)[0].values()) for repeated in (False, True)
    )
    assert bytes_once < bytes_repeated / 5
