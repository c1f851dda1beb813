"""Where a lone caller's request spends its time: by Triton's own counters, and by those of a model's process."""

import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.inprocess import PAUSE_S
from benchmarks.measure import Result
from serving.backend.metrics import STAGES, Publisher
from serving.server import Server

# By the stage: the counter that has its time, in seconds, and one of these units.
TRITON = {
    "queue": "nv_inference_queue_duration_us",
    "inputs": "nv_inference_compute_input_duration_us",
    "model": "nv_inference_compute_infer_duration_us",
    "outputs": "nv_inference_compute_output_duration_us",
}
# How they are shown, and those of the model's process. `execute` counts from when Triton hands a request over until
# its outputs are ready, and contains what follows it.
SHOWN = {
    "queue": "Triton's queue",
    "inputs": "inputs copied",
    "model": "from Triton to the model's process, all in it, and back",
    "execute": "… in it, until the outputs are ready",
    "check": "… read, accepted and checked",
    "merge": "… merged",
    "lookup": "… looked up",
    "score": "… scored",
    "split": "… cut into outputs, and counted",
    "outputs": "outputs copied and sent",
}
# Whose requests are asked for.
MODELS = ("lookup", "scores", "histories")
ROUNDS, COLD_ROUNDS = 600, 150


def run(server: Server, model: str, name: str, ask: Callable[[], Any]) -> Iterator[Result]:
    """Mean times of all stages, of one request after another, and of requests that are `PAUSE_S` apart.

    Args:
        server: nobody else asks it.
        model: the model's name.
        name: of the figures.
        ask: asks the model once.
    """
    for what, rounds, pause_s in (("", ROUNDS, 0.0), ("_cold", COLD_ROUNDS, PAUSE_S)):
        before = _counted(server, model)
        started = time.perf_counter()
        for _ in range(rounds):
            time.sleep(pause_s)
            ask()
        took = (time.perf_counter() - started) / rounds
        after = _counted(server, model)
        if not pause_s:
            yield Result(f"stage_caller_{name}_s", took)
        for stage, seconds in after.items():
            yield Result(f"stage_{stage}_{name}{what}_s", (seconds - before[stage]) / rounds)


def _counted(server: Server, model: str) -> Mapping[str, float]:
    """Seconds of each stage, of all requests so far."""
    time.sleep(2 * Publisher.PERIOD_S)
    with urllib.request.urlopen(f"{server.operations}/metrics") as page:
        text = page.read().decode()

    def total(counter: str, *labels: str) -> float:
        lines = re.findall(rf"^{counter}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        labels_of_model = {f'model="{model}"', *labels}
        return sum(float(number) for said, number in lines if labels_of_model <= {*said.split(",")})

    return {
        **{stage: 1e-6 * total(counter) for stage, counter in TRITON.items()},
        "execute": total("tbe_request_seconds_sum"),
        **{stage: total("tbe_stage_seconds_sum", f'stage="{stage}"') for stage in STAGES},
    }
