"""Versions that are rolled out and back under load: no answer is of two, and none fails."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from export.publish.published import release
from tests.faults.hosts.callers import asking, single_attempt
from tests.faults.hosts.fleet import PATIENCE_S, Fleet
from tests.support.host_faults import load
from tests.support.hosts import MODEL
from tests.support.servers import Running, running

# As long as versions are rolled out and back.
ROLLING_S = 60.0
# Longer than any lookup takes: what was asked of the old version before is answered.
LONGEST_S = 1.0


def half_rolled(fleet: Fleet) -> str:
    """One replica of each host lacks the new version, and the router switches to and fro."""
    for host in range(fleet.hosts):
        fleet.stop((host, 1))
        fleet.start((host, 1), versions=(1,))
    switches = 0
    with asking(fleet.router.grpc, fleet.requests(1, 2)) as answers:
        for version in (2, 1) * 3:
            done = load(fleet.router, MODEL, version)
            if done.returncode:
                raise SystemExit(done.stderr)
            switches += 1
    return (
        f"{switches} switches of a router half of whose replicas lack a version: {len(answers.right):,} answers, "
        f"{len(answers.wrong)} of neither version or of both, {len(answers.failed)} failed"
    )


def rolled(fleet: Fleet) -> str:
    """All servers follow releases, as docs/rolling-out.md says: hosts before routers, and back, again and again."""
    for machine in fleet.machines:
        fleet.stop(machine)
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda replica_id: fleet.start_following(replica_id, "--unload-after-s", str(LONGEST_S)),
                fleet.machines,
            )
        )
    rolls, model = 0, fleet.folder / "router" / MODEL
    with _following(model) as router, asking(router.grpc, fleet.requests(1, 2)) as answers:
        began = time.monotonic()
        while time.monotonic() < began + ROLLING_S:
            for new, old in ((2, 1), (1, 2)):
                _roll(fleet, model, router, new, old)
                rolls += 1
        took_s = time.monotonic() - began
    if answers.failed:
        raise SystemExit(f"{len(answers.failed)} lookups failed while versions were rolled out: {answers.failed[0]}")
    return (
        f"{rolls} versions rolled out under load within {took_s:.0f} s, hosts before the router: "
        f"{len(answers.right):,} answers, {len(answers.wrong)} of neither version or of both, {len(answers.failed)} failed"
    )


@contextmanager
def _following(model: Path) -> Iterator[Running]:
    """A router that follows its release, which is version 1 for now."""
    release(model, [1])
    with running(model.parent, "--follow", "--unload-after-s", str(LONGEST_S)) as router:
        yield router


def _roll(fleet: Fleet, router_model: Path, router: Running, new: int, old: int) -> None:
    """Hosts load the new version beside the old one, the router switches, hosts unload the old one."""
    models = {machine: fleet.model_of(machine) for machine in fleet.machines}
    for model in models.values():
        release(model, [old, new])
    for name, model in models.items():
        _until_served(fleet.running[name].grpc, model.name, [old, new])
    release(router_model, [new])
    _until_answered(router.grpc, new)
    time.sleep(LONGEST_S)
    for model in models.values():
        release(model, [new])
    for name, model in models.items():
        _until_served(fleet.running[name].grpc, model.name, [new])


def _until_served(address: str, model: str, versions: Sequence[int]) -> None:
    """Until a server serves these versions of a model, and no other."""
    end = time.monotonic() + PATIENCE_S
    with triton.InferenceServerClient(address) as client:
        while [number for number in (1, 2) if _is_ready(client, model, number)] != sorted(versions):
            if time.monotonic() > end:
                raise SystemExit(f"{address} does not serve versions {versions} of {model} within {PATIENCE_S:g} s")
            time.sleep(0.05)


def _is_ready(client: triton.InferenceServerClient, model: str, version: int) -> bool:
    try:
        return bool(client.is_model_ready(model, str(version)))
    except InferenceServerException:
        return False


def _until_answered(address: str, version: int) -> None:
    """Until a router answers from a version who names none."""
    end = time.monotonic() + PATIENCE_S
    with single_attempt(address) as client:
        while client.lookup({"n": [[0]]}).version != version:
            if time.monotonic() > end:
                raise SystemExit(f"the router does not serve version {version} within {PATIENCE_S:g} s")
            time.sleep(0.05)
