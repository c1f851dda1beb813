"""Whatever a host sends: requests that need it are refused by its name, and those merged with them are answered."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from serving.bundle.load import open_bundle
from serving.bundle.plan import path_of
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.errors import HostUnavailable
from serving.requests.accept import accept
from serving.requests.encoding import encode
from serving.router.hosts_config import HostsConfig
from tests.support.broken_http2 import WIRES, Wire, serve_http2
from tests.support.fake_hosts import BEHAVIOURS, Behaviour, FakeHost, fake_hosts, honest
from tests.support.host_faults import SPECS, Version, bags, export_version, open_plan
from tests.support.hosts import edit_manifest
from tests.support.long_cases import one_in

# A call takes milliseconds. Only hosts that fall silent are waited for.
TIMEOUT_S, SILENT_S = 20.0, 2.0
# With no sample there are no numbers, and nothing is wrong with these.
SEEN_WITHOUT_NUMBERS = [
    pytest.param(*lie, id=name, marks=[pytest.mark.long] if "200 MB" in name else [])
    for name, lie in BEHAVIOURS.items()
    if name not in ("FP16", "typed numbers", "a byte less")
]


@dataclass(frozen=True)
class Served:
    """A router's bundle and its hosts. `liar` is the number of one, and `kept` the features that need nothing of it."""

    version: Version
    hosts: Mapping[int, FakeHost]
    liar: int
    needed: list[str]
    unaffected: list[str]

    def addresses(self, liar: str | None = None) -> dict[int, str]:
        """Of the hosts, the liar perhaps elsewhere."""
        addresses = {number: host.address for number, host in self.hosts.items()}
        return addresses if liar is None else {**addresses, self.liar: liar}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    version = export_version(tmp_path_factory.mktemp("lying"), 1)
    (liar,) = open_plan(version)["blank"]
    on_liar = {name for name, hosts in open_plan(version).items() if liar in hosts}
    features = {
        name: [spec.features[0] for spec in SPECS if (spec.name in on_liar) == name] for name in (True, False)
    }
    with fake_hosts(version.bundle) as hosts:
        yield Served(version, hosts, liar, features[True], features[False])


@pytest.fixture
def liar(served: Served) -> Iterator[FakeHost]:
    host = served.hosts[served.liar]
    yield host
    host.behaviour, host.refuses = honest, 0


@contextmanager
def opened(served: Served, **options: Any) -> Iterator[Engine]:
    with Engine.open(
        served.version.bundle, HostsConfig(addresses=served.addresses(), timeout_s=TIMEOUT_S, **options)
    ) as file:
        yield file


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[Engine]:
    with opened(served) as loaded:
        yield loaded


def assert_lost_and_kept(served: Served, engine: Engine, said: str) -> None:
    """Two requests of one batch: the one that needs the liar is refused by its name, the other is answered right."""
    messages = [encode(bags(features, seed), ()) for seed, features in enumerate((served.needed, served.unaffected))]
    error, answer = engine.answer([accept(engine.schema, message) for message in messages]).outcomes()
    assert type(error) is HostUnavailable
    message = str(error)
    assert message.startswith("tables ")
    host = open_bundle(served.version.bundle).manifest.hosts[served.liar]
    name = rf": host {host.host} \({host.model} version 1 at [0-9.:]+\): "
    with pytest.raises(HostUnavailable, match=rf"{name}(.*; )?.*{said}"):
        raise error
    assert message.isprintable()
    assert len(message) <= 1000
    assert isinstance(answer, dict)
    np.testing.assert_array_equal(answer[EMBEDDINGS], served.version.one.outputs(messages[1])[EMBEDDINGS])


@pytest.mark.promise("Invalid answers of a host fail only requests that need the host")
@pytest.mark.parametrize(
    "refuses",
    [
        pytest.param(0, id="at the first attempt"),
        pytest.param(1, id="at the second attempt", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("lie", "said"), one_in(3, [pytest.param(*value, id=name) for name, value in BEHAVIOURS.items()])
)
def test_an_invalid_answer_fails_only_requests_that_need_the_host(
    served: Served, engine: Engine, liar: FakeHost, lie: Behaviour, said: str, refuses: int
) -> None:
    liar.behaviour, liar.refuses = lie, refuses
    assert_lost_and_kept(served, engine, said)
    liar.behaviour = honest
    every = bags([*served.needed, *served.unaffected], 3)
    for name, rows in served.version.one.lookup(every).items():
        np.testing.assert_array_equal(engine.lookup(every)[name], rows)


@pytest.mark.promise("A router loads no version and is unhealthy while a host answers nothing valid")
@pytest.mark.parametrize(("lie", "said"), one_in(4, SEEN_WITHOUT_NUMBERS))
def test_health_checks_and_opening_refuse_invalid_answers(
    served: Served, engine: Engine, liar: FakeHost, lie: Behaviour, said: str
) -> None:
    liar.behaviour = lie
    with pytest.raises(
        HostUnavailable, match=rf"^host {served.liar} \(movies-host-{served.liar} version 1 at .*{said}"
    ):
        engine.ranks.check()
    with pytest.raises(HostUnavailable, match=rf"^host {served.liar} \(movies-host-{served.liar} version 1 at "):
        Engine.open(served.version.bundle, HostsConfig(addresses=served.addresses(), timeout_s=SILENT_S))


@pytest.mark.promise("Malformed, oversized or interrupted answers of a host fail only requests that need it")
@pytest.mark.parametrize("does", one_in(4, WIRES.values()), ids=WIRES)
def test_a_malformed_answer_fails_only_requests_that_need_the_host(served: Served, does: Wire) -> None:
    """The engine is opened as one is that served before: nobody is asked first."""
    request = bags(served.needed, 0)
    host = served.hosts[served.liar]
    answers: list[bytes] = []

    def keep_response(response: Any, _: Any) -> Iterator[bytes]:
        answers.append(response.SerializeToString())
        yield answers[-1]

    host.behaviour = keep_response
    with opened(served) as engine:
        answers.clear()
        engine.lookup(request)
    host.behaviour = honest
    with serve_http2(does, answers[0]) as address:
        addresses = HostsConfig(addresses=served.addresses(address), timeout_s=SILENT_S)
        with Engine(open_bundle(served.version.bundle), addresses, None) as engine:
            assert_lost_and_kept(served, engine, "")
            with pytest.raises(HostUnavailable, match=f"^host {served.liar} "):
                engine.ranks.check()


def assert_refused_as_another_part(router: Path, addresses: Mapping[int, str]) -> None:
    with pytest.raises(HostUnavailable) as refused:
        Engine.open(router, HostsConfig(addresses=addresses, timeout_s=SILENT_S))
    said = str(refused.value).split("; host ")
    assert len(said) == 2
    expected = (
        r"\): expected part [0-9a-f]{64}/\d \(plan/host\), this is part [0-9a-f]{64}/\d: movies-host-\d version 1"
    )
    assert all(re.search(expected, text) for text in said)


@pytest.mark.promise("A host's manifest that contradicts itself or its router's plan is refused")
def test_swapped_host_bundles_are_refused_when_the_engine_opens(served: Served, tmp_path: Path) -> None:
    """The hosts are honest, and have the very bundles that the router's names for them."""
    router = shutil.copytree(served.version.bundle, tmp_path / "movies" / "1")
    first, second = open_bundle(router).manifest.hosts
    edit_manifest(
        router, hosts=(replaced(first, manifest=second.manifest), replaced(second, manifest=first.manifest))
    )
    addresses = served.addresses()
    assert_refused_as_another_part(router, {0: addresses[1], 1: addresses[0]})


def test_bundles_of_another_plan_are_refused_when_the_engine_opens(served: Served, tmp_path: Path) -> None:
    """Their segments may have the same names and widths, and other rows. The hosts are honest, and have them."""
    repository = shutil.copytree(served.version.bundle.parent.parent, tmp_path / "r")
    router = repository / "movies" / "1"
    hosts = []
    for host in open_bundle(router).manifest.hosts:
        bundle = path_of(router, host)
        part = open_bundle(bundle).manifest.part_of
        assert part is not None
        edit_manifest(bundle, part_of=replaced(part, plan="0" * 64))
        hosts.append(replaced(host, manifest=open_bundle(bundle).digest))
    edit_manifest(router, hosts=tuple(hosts))
    with fake_hosts(router) as honest:
        assert_refused_as_another_part(router, {number: value.address for number, value in honest.items()})


def test_answers_larger_than_the_first_limit_are_taken(served: Served, engine: Engine) -> None:
    """Each limit has a channel of its own, which is made when it is needed."""
    samples = 6 << 20 >> 6
    request = {name: [[1]] * samples for name in served.needed}
    for name, rows in served.version.one.lookup(request).items():
        np.testing.assert_array_equal(engine.lookup(request)[name], rows)
