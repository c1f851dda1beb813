"""A host that lies to a router: every lie, and every way to break off on the wire, under load."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from serving.client import LookupClient, Retries
from serving.errors import ServingError
from tests.support.broken_http2 import WIRES, Wire, serve_http2
from tests.support.fake_hosts import BEHAVIOURS, Behaviour, fake_hosts, honest
from tests.support.host_faults import EVERY, SPECS, bags, export_version, open_plan, same, until
from tests.support.hosts import MODEL, configure, only
from tests.support.relay import Relay
from tests.support.servers import running

# A host that tells the truth is rarely as late, on a busy machine either; then it is asked again.
TIMEOUT_S = 3.0
LATE = "no answer within"
CALLERS = 4
# On a busy machine a request may wait longer than the default: that it is shed is no harm of a lie.
SETTINGS = ("--instances", "2", "--max-busy-ms", "60000")


@dataclass
class Seen:
    """What callers saw. `others_…` needed nothing of the host; of those that failed, what was said."""

    lies: int = 0
    refused: int = 0
    nameless: int = 0
    answered_out_of_a_lie: int = 0
    others_right: int = 0
    others_wrong: int = 0
    others_failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    retold: int = 0

    def add(self, other: "Seen") -> None:
        """What callers saw of one more lie."""
        for counted in fields(self):
            so_far, more = getattr(self, counted.name), getattr(other, counted.name)
            setattr(self, counted.name, max(so_far, more) if counted.name == "longest_s" else so_far + more)

    def line(self) -> str:
        """All in one."""
        return (
            f"a host that lies in {self.lies} ways: {self.refused} refused, {self.nameless} of them without its name, "
            f"{self.answered_out_of_a_lie} answered; without it {self.others_right} right, {self.others_wrong} wrong, "
            f"{len(self.others_failed)} failed; after {1000 * self.longest_s:.0f} ms at most "
            f"(shard-timeout-ms {1000 * TIMEOUT_S:.0f}); {self.retold} told twice"
        )


def answer_or_error(client: LookupClient, request: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str | None]:
    """The answer, or what was said in place of one."""
    try:
        return client.lookup(request), None
    except ServingError as refused:
        return None, str(refused)


def lied(folder: Path, times: int) -> Seen:
    """A router of a real tritonserver, one of whose hosts lies in each way, `times` times to each of some callers."""
    version, result = export_version(folder, 1), Seen()
    (number,) = open_plan(version)["blank"]
    on_liar = {name for name, hosts in open_plan(version).items() if number in hosts}
    unaffected = [spec.features[0] for spec in SPECS if spec.name not in on_liar]
    with ExitStack() as stack:
        hosts = stack.enter_context(fake_hosts(version.bundle))
        liar = hosts[number]
        relay = stack.enter_context(Relay(liar.address))
        router_repository = only(version.bundle.parent.parent, [MODEL], folder / "router")
        addresses = {
            host: [relay.address if host == number else bundle_host.address] for host, bundle_host in hosts.items()
        }
        configure(router_repository / MODEL, addresses, "--shard-timeout-ms", str(int(1000 * TIMEOUT_S)), *SETTINGS)
        router = stack.enter_context(running(router_repository))
        clients = [
            stack.enter_context(LookupClient(router.grpc, MODEL, 60, retries=Retries(attempts=1)))
            for _ in range(CALLERS)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(CALLERS))

        requests = {
            needs: [bags(EVERY if needs else unaffected, seed) for seed in range(times)] for needs in (True, False)
        }
        expected = {
            needs: [version.one.lookup(features) for features in request] for needs, request in requests.items()
        }
        one_at_a_time = threading.Lock()

        def ask(result: Seen, caller: int, is_relayed: bool = False) -> None:
            needs = caller % 2 == 0
            for request, rows in zip(requests[needs], expected[needs], strict=True):
                started = time.monotonic()
                answer, error = answer_or_error(clients[caller], request)
                for _ in range(3):
                    if needs or error is None or LATE not in error:
                        break
                    answer, error = answer_or_error(clients[caller], request)
                with one_at_a_time:
                    result.longest_s = max(result.longest_s, time.monotonic() - started)
                    if answer is None:
                        result.refused += needs
                        result.others_failed += [] if needs else [str(error)]
                        result.nameless += needs and f"host {number} ({MODEL}-host-{number}" not in str(error)
                    elif needs:
                        # A connection that is being reset may still bring the truth.
                        result.answered_out_of_a_lie += not (is_relayed and same(answer, rows))
                    elif same(answer, rows):
                        result.others_right += 1
                    else:
                        result.others_wrong += 1

        def until_well() -> None:
            every = bags(EVERY, 99)

            def is_well() -> bool:
                try:
                    clients[0].lookup(every)
                except ServingError:
                    return False
                return True

            until(is_well, "the router answers")

        def tell(lie: Behaviour) -> Seen:
            liar.behaviour = lie
            lied_once = Seen(lies=1)
            list(pool.map(partial(ask, lied_once), range(CALLERS)))
            liar.behaviour = honest
            return lied_once

        def break_off(does: Wire) -> Seen:
            lied_once = Seen(lies=1)
            with serve_http2(does, b"an answer") as address:
                relay.turn(address)
                list(pool.map(partial(ask, lied_once, is_relayed=True), range(CALLERS)))
            relay.turn(liar.address)
            return lied_once

        for start_lie in (
            *(partial(tell, lie) for lie, _ in BEHAVIOURS.values()),
            *(partial(break_off, on) for on in WIRES.values()),
        ):
            until_well()
            lied_once = start_lie()
            if lied_once.nameless or lied_once.others_failed:
                # Triton ends a model's process that stood still for a second, as it may on a busy machine, and all is
                # refused until it is loaded again. Who lies once more does the same harm once more.
                until_well()
                lied_once, result.retold = start_lie(), result.retold + 1
            result.add(lied_once)
        until_well()
    return result
