"""A host all of whose replicas are lost: what needs it is refused by name and in time."""

import time
from contextlib import ExitStack

import numpy as np

from serving.errors import ServingError
from tests.faults.hosts.callers import CLIENTS, asking, single_attempt, until_back
from tests.faults.hosts.fleet import PATIENCE_S, REPLICAS, TIMEOUT_S, Fleet
from tests.faults.hosts.links import DROP_IN, DROP_OUT, FAULT_S
from tests.support.hosts import MODEL


def host_lost(fleet: Fleet, what: str, *rules: str) -> str:
    """All replicas of a host are lost."""
    lost = 0
    needing, other = fleet.requests(1, only_host=lost), fleet.requests(1, without=lost)
    with ExitStack() as stack:
        needy = stack.enter_context(asking(fleet.router.grpc, needing))
        with ExitStack() as faults:
            for replica in range(REPLICAS):
                faults.enter_context(fleet.machines[lost, replica].filtered(*rules))
            cut = time.monotonic()
            with asking(fleet.router.grpc, other) as unaffected:
                time.sleep(FAULT_S)
            healed = time.monotonic()
        time.sleep(FAULT_S)
        if not any(right_s > healed for right_s in needy.right):
            raise SystemExit("the host is not back")
    back_s = max(0.0, max(failed_s for failed_s, _, _ in needy.failed) - healed)
    errors = [(took_s, said) for failed_s, took_s, said in needy.failed if failed_s > cut]
    untyped = sum(f"host {lost} ({MODEL}-host-{lost}" not in said for _, said in errors)
    longest = np.percentile([took_s for took_s, _ in errors], [50, 99, 100]) * 1000
    return (
        f"all replicas of a host {what}: {len(errors)} refused, {untyped} of them without its name, "
        f"after {longest[0]:.0f} ms (p50), {longest[1]:.0f} ms (p99), {longest[2]:.0f} ms at most "
        f"(shard-timeout-ms {1000 * TIMEOUT_S:.0f}, {CLIENTS * 2} callers on two instances); "
        f"without it {len(unaffected.right):,} right, {len(unaffected.wrong) + len(unaffected.failed)} not; "
        f"{len(needy.wrong)} wrong; no refusal {back_s:.1f} s after it returned"
    )


def alone_in_time(fleet: Fleet) -> str:
    """How long a typed error takes, one caller at a time."""
    (request, _), *_ = fleet.requests(1, only_host=0)
    took = []
    with ExitStack() as stack:
        for replica in range(REPLICAS):
            stack.enter_context(fleet.machines[0, replica].filtered(DROP_IN, DROP_OUT))
        client = stack.enter_context(single_attempt(fleet.router.grpc))
        client.info()
        for _ in range(30):
            started = time.monotonic()
            try:
                client.lookup(request)
            except ServingError:
                took.append(time.monotonic() - started)
    most = max(took)
    until_back(fleet)
    return (
        f"one caller of a host that fell silent: a typed error after {1000 * most:.0f} ms at most, "
        f"{most / TIMEOUT_S:.2f} of shard-timeout-ms, {1000 * np.median(took):.0f} ms once it was noticed"
    )


def router_killed(fleet: Fleet) -> str:
    """The router's tritonserver is killed while a host is lost."""
    with ExitStack() as stack:
        for replica in range(REPLICAS):
            stack.enter_context(fleet.machines[0, replica].filtered(DROP_IN, DROP_OUT))
        answers = stack.enter_context(asking(fleet.router.grpc, fleet.requests(1, without=0)))
        while not answers.right:
            time.sleep(0.01)
        killed_at = time.monotonic()
        fleet.router.triton.kill()
        time.sleep(0.5)
        before = len(answers.right)
        while len(answers.right) <= before:
            if time.monotonic() > killed_at + PATIENCE_S:
                raise SystemExit("the router does not serve again")
            time.sleep(0.01)
        back_s = time.monotonic() - killed_at
    until_back(fleet)
    return (
        f"the router killed while a host is lost: it answered again after {back_s:.1f} s, {len(answers.wrong)} wrong"
    )
