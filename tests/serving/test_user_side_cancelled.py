"""Rankings that their callers cancel, in Triton's queue and in a merged batch: others get their own scores."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serving.client import AsyncLookupClient
from serving.server import Server, run_server
from tests.serving.test_user_side_served import Served, Summed
from tests.support.models import SUM, random_bags
from tests.support.scored_models import EXACT
from tests.support.server_waits import PATIENCE_S, wait_until
from tests.support.servers import FREE, metric, replace_model_py, wait_for_pending

ITEMS, RANKINGS = 20, 9

# Holds one request that is alone in a call while `alone` exists, and several while `merged` exists.
HELD = """
import time
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.engine import Engine

answer, folder = Engine.answer, Path({folder!r})

def answer_when_released(self, requests):
    gate = folder / ("merged" if len(requests) > 1 else "alone")
    while gate.exists():
        (folder / (gate.name + ".entered")).touch()
        time.sleep(0.01)
    return answer(self, requests)

Engine.answer = answer_when_released
"""


def test_cancelled_rankings_change_no_other_answer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Served(Summed(), ["x"], lambda random, samples: (dict(random_bags(random, SUM, samples)), {}), EXACT)
    bundle = model.export(tmp_path / "r", "m")
    replace_model_py(bundle, HELD.format(folder=str(tmp_path)))
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        asyncio.run(_cancel_some(server, model, tmp_path))


async def _cancel_some(server: Server, model: Served, folder: Path) -> None:
    alone, merged = folder / "alone", folder / "merged"
    rankings = [model.ranking(seed, ITEMS) for seed in range(RANKINGS)]
    before = await asyncio.to_thread(_counted, server)
    async with AsyncLookupClient(server.grpc, "m", PATIENCE_S) as client:
        await client.info()
        for gate in (alone, merged):
            gate.touch()
        tasks = [asyncio.create_task(_score(client, model, rankings[0]))]
        await _entered(alone)
        tasks += [asyncio.create_task(_score(client, model, request)) for request in rankings[1:]]
        await asyncio.to_thread(wait_for_pending, server, "m", RANKINGS - 1)
        for task in tasks[2:4]:  # in Triton's queue
            task.cancel()
        alone.unlink()
        await _entered(merged)
        for task in tasks[4:6]:  # merged with others
            task.cancel()
        merged.unlink()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    for number, answer in enumerate(answers):
        if 2 <= number < 6:
            assert isinstance(answer, asyncio.CancelledError)
        else:
            model.expect_right(answer, rankings[number])
    answered, dropped, in_queue = np.subtract(await asyncio.to_thread(_counted, server), before)
    # A cancelled ranking is dropped before it is looked up, by Triton or by the model; or it is scored with the others,
    # if the server hears of it too late.
    assert answered + dropped + in_queue == RANKINGS
    assert answered >= RANKINGS - 4


def _counted(server: Server) -> tuple[float, float, float]:
    return (
        metric(server, "tbe_user_side_total", model="m"),
        metric(server, "tbe_cancelled_total", model="m"),
        metric(server, "nv_inference_request_failure", model="m", reason="CANCELED"),
    )


async def _score(client: AsyncLookupClient, model: Served, request: Any) -> Any:
    return await client.score(request.bags, request.dense, shared=model.user_side)


async def _entered(gate: Path) -> None:
    entered = gate.with_name(f"{gate.name}.entered")
    await asyncio.to_thread(wait_until, entered.exists, f"{gate.name}: no request came")
