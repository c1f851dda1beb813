"""Hosts that lie at random: whatever they send, a request gets its answer, or HostUnavailable, and its neighbours are
answered right.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.errors import HostUnavailable, ServingError
from serving.requests.accept import accept
from serving.requests.encoding import encode
from serving.requests.types import Tensors
from serving.router.hosts_config import HostsConfig
from tests.support.fake_hosts import BEHAVIOURS, Behaviour, FakeHost, fake_hosts, honest
from tests.support.host_faults import EVERY, SPECS, Version, bags, export_version, open_plan

TOGETHER = 4
# A lie that keeps a call waiting is one of the faults, not one of these.
TIMEOUT_S = 20.0


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        lies: how many answers of the host were none.
        refused: requests that needed one of them.
        answered: requests that were answered right.
        wrong: what should not have been, a line each.
    """

    lies: int = 0
    refused: int = 0
    answered: int = 0
    said: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All in one."""
        return (
            f"{self.lies:,} lies of a host: {self.refused:,} requests refused by its name, {self.answered:,} answered "
            f"right, {len(self.wrong)} wrong"
        )


@dataclass
class Mangled:
    """A lie: the bytes of the answer, some of them changed. Afterwards, whether that is still an answer."""

    random: np.random.Generator
    is_answer: bool = True

    def __call__(self, response: Any, _: Any) -> Iterator[bytes]:
        mangled = response.SerializeToString()
        for _ in range(int(self.random.integers(1, 4))):
            mangled = self._changed(mangled)
        self.is_answer = _is_alike(mangled, response)
        yield mangled

    def _changed(self, message: bytes) -> bytes:
        # Most lies are about what is not a number: that comes first.
        most = len(message) if self.random.random() < 0.3 else min(len(message), 80)
        offset = int(self.random.integers(most + 1))
        few = self.random.bytes(int(self.random.integers(1, 5)))
        return [
            message[:offset] + few + message[offset + len(few) :],
            message[:offset] + few + message[offset:],
            message[:offset],
        ][int(self.random.integers(3))]


def _is_alike(message: bytes, response: Any) -> bool:
    """Whether all that can be told of a message is right. Its numbers cannot."""
    try:
        parsed = pb.ModelInferResponse.FromString(message)
    except DecodeError:
        return False
    contents = [
        [
            reply.model_name,
            reply.model_version,
            [(output.name, output.datatype, [*output.shape]) for output in reply.outputs],
            [len(raw) for raw in reply.raw_output_contents],
        ]
        for reply in (parsed, response)
    ]
    return contents[0] == contents[1]


def fuzz_hosts(folder: Path, count: int, seed: int = 0) -> Outcome:
    """Have a host lie `count` times; stop at the tenth thing that is wrong."""
    random, outcome = np.random.default_rng(seed), Outcome()
    with _opened(folder) as (version, engine, liar, number):
        on_liar = {name for name, hosts in open_plan(version).items() if number in hosts}
        unaffected = [spec.features[0] for spec in SPECS if spec.name not in on_liar]
        catalog = [lie for name, (lie, _) in BEHAVIOURS.items() if "200 MB" not in name]
        while outcome.lies < count and len(outcome.wrong) < 10:
            mangled = Mangled(random)
            liar.behaviour = mangled if random.random() < 0.8 else catalog[int(random.integers(len(catalog)))]
            features = [EVERY if random.random() < 0.5 else unaffected for _ in range(TOGETHER)]
            features[0] = EVERY
            messages = [encode(bags(feature, int(random.integers(1000))), ()) for feature in features]
            _judge(version, engine, messages, [feature is EVERY for feature in features], liar.behaviour, outcome)
            outcome.lies += 1
        liar.behaviour = honest
    return outcome


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Version, Engine, FakeHost, int]]:
    version = export_version(folder, 1)
    (number,) = open_plan(version)["blank"]
    with fake_hosts(version.bundle) as hosts:
        addresses = {host: fake.address for host, fake in hosts.items()}
        with Engine.open(version.bundle, HostsConfig(addresses=addresses, timeout_s=TIMEOUT_S)) as engine:
            yield version, engine, hosts[number], number


def _judge(
    version: Version,
    engine: Engine,
    requests: list[Tensors],
    needs: list[bool],
    lie: Behaviour | Mangled,
    outcome: Outcome,
) -> None:
    outcomes = engine.answer([accept(engine.schema, tensors) for tensors in requests]).outcomes()
    for tensors, needed, result in zip(requests, needs, outcomes, strict=True):
        if isinstance(result, ServingError):
            outcome.refused += 1
            if not needed or type(result) is not HostUnavailable or ": host " not in str(result):
                outcome.wrong.append(f"{type(result).__name__}: {result}")
            if len(str(result)) > 1000 or not str(result).isprintable():
                outcome.wrong.append(f"not fit for a screen: {result}")
            if needed and isinstance(lie, Mangled) and lie.is_answer:
                outcome.wrong.append(f"refused though nothing is wrong but numbers: {result}")
        elif not needed:
            if np.array_equal(result[EMBEDDINGS], version.one.outputs(tensors)[EMBEDDINGS]):
                outcome.answered += 1
            else:
                outcome.wrong.append("a request that needs nothing of the host got other numbers")
        elif not (isinstance(lie, Mangled) and lie.is_answer):
            outcome.wrong.append("answered out of a lie")
