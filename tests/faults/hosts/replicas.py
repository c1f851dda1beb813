"""Faults of one of two replicas of a host: nobody should notice."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from tests.faults.hosts.callers import asking
from tests.faults.hosts.fleet import At, Fleet
from tests.faults.hosts.links import DROP_IN, DROP_OUT, FAULT_S, LOSE_IN, LOSE_OUT, REJECT_IN

# The first second of a fault may be needed to notice it.
NOTICED_S = 1.0

Fault = Callable[[Fleet, At], AbstractContextManager[None]]


@contextmanager
def killed(fleet: Fleet, at: At) -> Iterator[None]:
    """tritonserver is killed. `tbe-serve run` starts it anew."""
    fleet.running[at].triton.kill()
    yield


@contextmanager
def stopped(fleet: Fleet, at: At) -> Iterator[None]:
    """SIGSTOP."""
    server = fleet.running[at].triton
    server.suspend()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def restarted(fleet: Fleet, at: At) -> Iterator[None]:
    """As `kubectl delete pod` does."""
    fleet.stop(at)
    fleet.start(at)
    yield


def filtered(*rules: str) -> Fault:
    return lambda fleet, at: fleet.machines[at].filtered(*rules)


ONE_REPLICA: Mapping[str, Fault] = {
    "killed": killed,
    "stopped (SIGSTOP)": stopped,
    "cut off both ways": filtered(DROP_IN, DROP_OUT),
    "cut off inwards": filtered(DROP_IN),
    "cut off outwards": filtered(DROP_OUT),
    "rejecting (TCP reset)": filtered(REJECT_IN),
    "losing 30 % of its packets": filtered(LOSE_IN, LOSE_OUT),
    "restarted": restarted,
}


def one_replica(fleet: Fleet, what: str, fault: Fault) -> str:
    """A fault of one of two replicas, under load."""
    at = (0, 1)
    with asking(fleet.router.grpc, fleet.requests(1)) as seen:
        fleet.until_asked(at)
        begin = time.monotonic()
        with fault(fleet, at):
            time.sleep(max(0.0, FAULT_S - (time.monotonic() - begin)))
            end = time.monotonic()
        back_s = fleet.until_asked(at)
    late = seen.failed_between(begin + NOTICED_S, float("inf"))
    return (
        f"one of two replicas {what}: {len(seen.right):,} answers, {len(seen.wrong)} wrong, {len(seen.failed)} failed, "
        f"{late} of them after {NOTICED_S:g} s; asked again {back_s:.1f} s after the {end - begin:.0f} s"
    )


def other_bundle(fleet: Fleet) -> str:
    """A replica comes back with another export of the same version, then without the version."""
    at = (0, 1)
    with asking(fleet.router.grpc, fleet.requests(1)) as seen:
        for repository, versions in ((fleet.folder / "other" / "r", (1,)), (None, (2,)), (None, (1, 2))):
            fleet.stop(at)
            fleet.start(at, repository, versions)
            time.sleep(2)
        fleet.until_asked(at)
    return (
        f"a replica restarted with another bundle, then without the version, then right: {len(seen.right):,} answers, "
        f"{len(seen.wrong)} wrong, {len(seen.failed)} failed"
    )
