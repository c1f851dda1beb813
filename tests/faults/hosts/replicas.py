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
def killed(fleet: Fleet, replica_id: At) -> Iterator[None]:
    """tritonserver is killed. `tbe-serve run` starts it anew."""
    fleet.running[replica_id].triton.kill()
    yield


@contextmanager
def stopped(fleet: Fleet, replica_id: At) -> Iterator[None]:
    """SIGSTOP."""
    server = fleet.running[replica_id].triton
    server.suspend()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def restarted(fleet: Fleet, replica_id: At) -> Iterator[None]:
    """As `kubectl delete pod` does."""
    fleet.stop(replica_id)
    fleet.start(replica_id)
    yield


def filtered(*rules: str) -> Fault:
    return lambda fleet, replica_id: fleet.machines[replica_id].filtered(*rules)


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
    replica_id = (0, 1)
    with asking(fleet.router.grpc, fleet.requests(1)) as answers:
        fleet.until_asked(replica_id)
        begin = time.monotonic()
        with fault(fleet, replica_id):
            time.sleep(max(0.0, FAULT_S - (time.monotonic() - begin)))
            end = time.monotonic()
        back_s = fleet.until_asked(replica_id)
    late = answers.failed_between(begin + NOTICED_S, float("inf"))
    return (
        f"one of two replicas {what}: {len(answers.right):,} answers, {len(answers.wrong)} wrong, {len(answers.failed)} failed, "
        f"{late} of them after {NOTICED_S:g} s; asked again {back_s:.1f} s after the {end - begin:.0f} s"
    )


def other_bundle(fleet: Fleet) -> str:
    """A replica comes back with another export of the same version, then without the version."""
    replica_id = (0, 1)
    with asking(fleet.router.grpc, fleet.requests(1)) as answers:
        for repository, versions in ((fleet.folder / "other" / "r", (1,)), (None, (2,)), (None, (1, 2))):
            fleet.stop(replica_id)
            fleet.start(replica_id, repository, versions)
            time.sleep(2)
        fleet.until_asked(replica_id)
    return (
        f"a replica restarted with another bundle, then without the version, then right: {len(answers.right):,} answers, "
        f"{len(answers.wrong)} wrong, {len(answers.failed)} failed"
    )
