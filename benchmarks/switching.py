"""A version of some GB whose file is not in memory is loaded, while one client asks without a pause."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Result, p50, ratio
from benchmarks.model_memory import huge_bytes
from benchmarks.workload import NAME
from examples.hosts.dlrm import IDS_PER_SAMPLE
from serving.bench.requests import Distribution, random_requests
from serving.bundle.manifest import Manifest
from serving.client import LookupClient
from serving.requests.encoding import Features
from serving.server import Ports, Server, run_server
from serving.server.versions import switch

SAMPLES = 16
# How long is asked before the switch, right after it, and once the new file has had time to come into memory.
SECONDS = 4.0
SETTLING_S = 5.0
# Loading compares a file with its digests, which reads all of it.
_TIMEOUT_S = 300.0


class _Call(NamedTuple):
    """When it began and how long it took, in seconds; and the version that answered."""

    began: float
    seconds: float
    version: int


def run(repository: Path, manifest: Manifest) -> Iterator[Result]:
    """Switch from version 1, which is in memory, to version 2, which is not. All requests are answered."""
    with run_server(repository, Ports(grpc=0, http=0, operations=0), models=[NAME], pins={NAME: (1,)}) as server:
        calls, began, ended = _ask_while_switching(server, _requests(manifest))
        huge = huge_bytes(server)
    times = {
        "before": [call.seconds for call in calls if call.began < began],
        "meanwhile": [call.seconds for call in calls if began <= call.began < ended],
        "after": [call.seconds for call in calls if ended <= call.began < ended + SECONDS],
        "settled": [call.seconds for call in calls if call.began >= ended + SECONDS + SETTLING_S],
    }
    assert {call.version for call in calls if call.began < began} == {1}
    assert {call.version for call in calls if call.began >= ended} == {2}
    yield Result("switch_s", ended - began)
    yield ratio("switch_huge_share", huge / (repository / NAME / "2" / "weights.0.bin").stat().st_size)
    for when, seconds in times.items():
        yield Result(f"switch_{when}_p50_b{SAMPLES}_s", p50(np.array(seconds)))
        yield Result(f"switch_{when}_p99_b{SAMPLES}_s", float(np.percentile(seconds, 99)))
        yield Result(f"switch_{when}_longest_b{SAMPLES}_s", max(seconds))


def _ask_while_switching(server: Server, requests: list[Features]) -> tuple[list[_Call], float, float]:
    """All calls, and when the switch began and ended, in the time of `time.perf_counter`."""
    calls: list[_Call] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            with LookupClient(server.grpc, NAME) as client:
                while not done.is_set():
                    began = time.perf_counter()
                    answer = client.lookup(requests[len(calls) % len(requests)])
                    calls.append(_Call(began, time.perf_counter() - began, answer.version))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        time.sleep(SETTLING_S)
        first = len(calls)
        time.sleep(SECONDS)
        began = time.perf_counter()
        switch(server.control(_TIMEOUT_S), NAME, (2,), repository=server.repository)
        ended = time.perf_counter()
        time.sleep(2 * SECONDS + SETTLING_S)
    finally:
        done.set()
        thread.join()
    assert not failed, failed
    return calls[first:], began, ended


def _requests(manifest: Manifest) -> list[Features]:
    """Uniform ids: values and lengths by feature."""
    factors = {feature.name: ids for feature, ids in zip(manifest.features, IDS_PER_SAMPLE, strict=True)}
    requests: list[Features] = []
    for tensors in random_requests(manifest, SAMPLES, Distribution(), factors):
        values = np.split(tensors.values, np.cumsum([ids * SAMPLES for ids in IDS_PER_SAMPLE])[:-1])
        lengths = np.split(tensors.lengths, len(IDS_PER_SAMPLE))
        names = [feature.name for feature in manifest.features]
        requests.append(dict(zip(names, zip(values, lengths, strict=True), strict=True)))
    return requests
