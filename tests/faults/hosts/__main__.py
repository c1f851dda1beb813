"""Each fault of hosts, and a line of figures for it.

    nsenter --net=/run/netns/MACHINE python -m tests.faults.hosts BRIDGE MACHINE=ADDRESS...

runs on the router's machine, the first; `tests.faults.hosts.machines` makes them all.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

from examples.hosts.network import Lan, Machine
from tests.faults.hosts.fleet import REPLICAS, Fleet
from tests.faults.hosts.links import DROP_IN, DROP_OUT, REJECT_IN, slow_link
from tests.faults.hosts.lost import alone_in_time, host_lost, router_killed
from tests.faults.hosts.replicas import ONE_REPLICA, one_replica, other_bundle
from tests.faults.hosts.rolling import half_rolled, rolled
from tests.support.reload_process import in_this_process


def all_faults(fleet: Fleet) -> Iterator[str]:
    """A line of figures for each fault."""
    yield slow_link(fleet, f"{fleet.hosts} hosts, {REPLICAS} replicas each, no fault", nullcontext())
    for what, fault in ONE_REPLICA.items():
        yield one_replica(fleet, what, fault)
    yield alone_in_time(fleet)
    yield host_lost(fleet, "silent", DROP_IN, DROP_OUT)
    yield host_lost(fleet, "rejecting", REJECT_IN)
    yield slow_link(fleet, "1 Gb/s between router and hosts", fleet.router_machine.limited("1gbit"))
    yield slow_link(fleet, "2 ms delay between router and hosts", fleet.lan.delayed(fleet.router_machine, 0.002))
    yield other_bundle(fleet)
    yield router_killed(fleet)
    yield half_rolled(fleet)
    yield rolled(fleet)


def main(bridge: str, *machines: str) -> None:
    network = Lan(bridge, [Machine(*machine.split("=")) for machine in machines])
    with tempfile.TemporaryDirectory(prefix="tbe-hosts-") as name, ExitStack() as stack, in_this_process():
        fleet = Fleet(stack, Path(name), network)
        for line in all_faults(fleet):
            print(line, flush=True)


main(*sys.argv[1:])
