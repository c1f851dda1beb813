"""Benchmarks of whole models: everyone is asked the same and answers it, and what is worked out of a run."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers_scores
from benchmarks.peer_servers import HERE, PEERS
from benchmarks.peer_workload import MODEL, PeerWorkload
from benchmarks.peers_scores import LOADS, SERVERS, Spread, peer_over_ours
from benchmarks.peers_served import NOTHING
from benchmarks.scores_model import DENSE, WIDTH
from benchmarks.scores_workload import ScoresWorkload
from serving.bundle.load import open_bundle
from serving.client import ModelInfo
from serving.engine import Engine


@pytest.fixture(scope="module")
def workload() -> ScoresWorkload:
    """Three tables of a dim, bags with fewer ids than they may have."""
    random = np.random.default_rng(0)
    padded = random.integers(0, [50, 50, 7, 7, 50], (3, 16, 5))
    padded[:, 0, 1] = padded[:, 1, 2:4] = -1
    tables = PeerWorkload("whole", [50, 7, 50], [16] * 3, [(0, 2), (1, 2), (2, 1)], {16: padded, 1: padded[:, :1]})
    return ScoresWorkload.make(tables)


@pytest.fixture
def info() -> ModelInfo:
    keys: dict[str, tuple[str, ...]] = {f"f{n}": (f"f{n}",) for n in range(3)}
    return ModelInfo(dict.fromkeys(keys, 16), keys, (), np.dtype(np.float32), "", np.dtype(np.int64), frozenset(), {})


@pytest.fixture
def rows(tmp_path: Path, workload: ScoresWorkload, info: ModelInfo) -> Path:
    workload.write(tmp_path / "rows", info)
    return tmp_path / "rows"


def test_the_peer_model_and_the_engine_answer_the_same_scores(
    tmp_path: Path, workload: ScoresWorkload, rows: Path
) -> None:
    sys.path.insert(0, str(HERE))
    from model import Model  # type: ignore[import-not-found]

    peer = Model(rows, "int8")
    engine = Engine(open_bundle(workload.export(tmp_path / "repository")))
    assert (peer.output, peer.width) == ("scores", 1)
    for samples in workload.tables.requests:
        saved = np.load(rows / f"requests_{samples}.npz")
        tensors = workload.tensors(samples)
        expected = [workload.answer(tensor) for tensor in tensors]
        np.testing.assert_array_equal(saved["answer"], expected[0])
        requests = [{name: saved[name][number] for name in ("ids", "dense")} for number in range(len(tensors))]
        for request, tensor, answer in zip(requests, tensors, expected, strict=True):
            np.testing.assert_allclose(peer(**request), answer, atol=0.02)
            np.testing.assert_allclose(engine.outputs(tensor)["scores"], answer, atol=0.02)
        for joined, answer in zip(peer.together(requests), expected, strict=True):
            np.testing.assert_allclose(joined, answer, atol=0.02)
    # What would pass if nobody looked at the ids, or at the dense inputs.
    assert expected[0].shape == (1, 1)
    assert np.ptp(workload.answer(workload.tensors(16)[0])) > 1


def test_requests_of_peers_come_back_as_they_were_packed() -> None:
    sys.path.insert(0, str(HERE))
    from arrays import pack, unpack  # type: ignore[import-not-found]

    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {"ids": random.integers(0, 9, (4, 3)), "dense": random.random((4, WIDTH), np.float32)}
    unpacked = unpack(pack(arrays), {"ids": (np.int64, 3), "dense": (np.float32, WIDTH)})
    assert list(unpacked) == ["ids", "dense"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(unpacked[name], array)


def test_scores_depend_on_ids_and_on_dense_inputs(workload: ScoresWorkload) -> None:
    first, other = workload.tensors(16)[:2]
    answer = workload.answer(first)
    ids = workload.answer(type(first)(None, other.values, other.lengths, dense=first.dense))
    dense = workload.answer(type(first)(None, first.values, first.lengths, dense=other.dense))
    assert first.dense[DENSE].shape == (16, WIDTH)
    assert np.abs(ids - answer).max() > peers_scores.TOLERANCE["int8"]
    assert np.abs(dense - answer).max() > peers_scores.TOLERANCE["int8"]


def test_all_servers_but_redis_serve_whole_models() -> None:
    named = {name.removesuffix("_int8") for name in SERVERS}
    assert {"torchserve", "litserve", "mosec", "pytriton", "ray_serve"} <= named
    assert {name.removesuffix("_fp32").removesuffix("_int8") for name in PEERS} - named == {"redis"}
    assert {peer.kind for peer in SERVERS.values()} == {"int8"}


def line(candidate: str, load: tuple[int, int], seconds: list[float], best_beside: Any = None) -> dict[str, Any]:
    """What was seen of a candidate that took so long in each round."""
    median = float(np.median(seconds))
    rates = [load[1] / second for second in seconds]
    figures: dict[str, Any] = {
        "candidate": candidate,
        "samples": load[0],
        "clients": load[1],
        "p50_s": median,
        "p50s_s": seconds,
    }
    figures |= {"p99_s": max(seconds), "rates": rates, "answers_per_s": float(np.median(rates))}
    return figures | {"beside": best_beside or figures}


def test_a_ratio_compares_times_measured_in_turn() -> None:
    ours = line(MODEL, (1, 1), [2e-3, 1e-3, 4e-3])
    assert peer_over_ours(line("mosec_int8", (1, 1), [4e-3, 3e-3, 4e-3], ours)) == pytest.approx(Spread(2, 1, 3))
    ours = line(MODEL, (1, 32), [2e-3, 1e-3, 4e-3])
    assert peer_over_ours(line("mosec_int8", (1, 32), [4e-3, 3e-3, 4e-3], ours)) == pytest.approx(Spread(2, 1, 3))


def test_the_best_peer_has_the_smallest_ratio_to_ours() -> None:
    lines = []
    for load in LOADS:
        quiet, noisy = line(MODEL, load, [1e-3]), line(MODEL, load, [4e-3])
        lines += [quiet, line(NOTHING, load, [1e-4], quiet), line("mosec_int8", load, [3e-3], quiet)]
        lines += [line("ray_serve_int8", load, [8e-3], noisy)]
    ratios = {ratio.name: ratio.value for ratio in peers_scores.ratios(lines)}
    kinds = ("p50_b1", "c32_b1", "p50_b128", "c32_b128")
    names = [f"best_peer_over_ours_scores_{kind}{end}" for kind in kinds for end in ("", "_low", "_high")]
    assert ratios == pytest.approx(dict.fromkeys(names, 2))
    assert not list(
        peers_scores.ratios([measured for measured in lines if measured["candidate"] in (MODEL, NOTHING)])
    )
