"""`make demo-hosts`: tables on four hosts, one killed, a version rolled out; what happened is printed, and a page."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import grpc
import psutil

from examples.hosts.callers import SAMPLES, Callers
from examples.hosts.dlrm import DIM, IDS_PER_SAMPLE, ROWS
from examples.hosts.model import CAP, HOSTS, SMALL
from examples.hosts.network import Lan, Machine, lan
from examples.hosts.report import Report
from examples.hosts.repositories import Repositories, weights_bytes
from examples.hosts.server import LIMIT_BYTES, Place, memory_limit, resident_bytes, served
from serving.protocol.messages import ModelReadyRequest, unary

FOLDER = Path("build/demo-hosts")
PAGE = FOLDER / "what-happened.md"
PATIENCE_S = 90.0


def run(places: Sequence[Place], router: Place, where: str) -> None:
    """The demo, once there are places."""
    report, repositories = Report(), Repositories(FOLDER)
    report.say("# DLRM-v2's tables on four hosts")
    report.step("Export")
    export(report, repositories)
    with ExitStack() as stack:
        report.step("Serve")
        hosts, callers = serve(report, repositories, places, router, where, stack)
        report.step("Kill a host")
        kill(report, hosts[0], callers)
        report.step("Roll out version 2")
        roll_out(report, repositories, places, callers)
    report.say(f"\n{time.monotonic() - report.began:.0f} s in all.")
    PAGE.write_text("\n".join(report.lines) + "\n")
    print(f"The page: {PAGE}")


def export(report: Report, repositories: Repositories) -> None:
    """Publish version 1, and say what is where."""
    repositories.export(1)
    repositories.distribute(1)
    repositories.release_on_hosts(1)
    repositories.release_on_router(1)
    report.say(
        f"{len(ROWS)} tables, dim {DIM}, INT4, generated rows: at most {CAP:,} of the 40,000,000 of the largest, "
        f"{sum(min(rows, CAP) for rows in ROWS):,} in all. "
        f"On hosts: {', '.join(f'{weights_bytes(model) / 1e6:.0f} MB' for model in repositories.hosts)}. "
        f"Tables of up to {SMALL:,} rows, {weights_bytes(repositories.router) / 1e6:.0f} MB, are in the router."
    )


def serve(
    report: Report,
    repositories: Repositories,
    places: Sequence[Place],
    router: Place,
    where: str,
    stack: ExitStack,
) -> tuple[Sequence["subprocess.Popen[str]"], Callers]:
    """Start all servers, until `stack` ends; ask them, and say what memory each takes."""
    groups = [stack.enter_context(memory_limit(f"tbe-demo-{os.getpid()}-{host}")) for host in range(HOSTS)]
    servers = [
        served(model.parent, machine, group)
        for model, machine, group in zip(repositories.hosts, places, groups, strict=True)
    ]
    with ThreadPoolExecutor(HOSTS) as pool:
        hosts = list(pool.map(stack.enter_context, servers))
    addresses = [part for host, machine in enumerate(places) for part in ("--host", f"{host}={machine.address}:8401")]
    configure = [sys.executable, "-m", "serving", "configure", str(repositories.router), "--instances", "2"]
    subprocess.run([*configure, *addresses], check=True, stdout=subprocess.DEVNULL)
    routing = stack.enter_context(served(repositories.router.parent, router, None))
    report.say(f"Four hosts and a router, {where}.")
    callers = stack.enter_context(Callers(f"{router.address}:8401"))
    time.sleep(5)
    report.say(f"Lookups of {SAMPLES} samples, {SAMPLES * sum(IDS_PER_SAMPLE):,} ids: {callers.window().line()}.")
    report.say("")
    report.say("| server | memory (PSS) | limit | its tables |")
    report.say("|---|---|---|---|")
    for host, (server, group, model) in enumerate(zip(hosts, groups, repositories.hosts, strict=True)):
        limit = f"{LIMIT_BYTES / 1e6:.0f} MB (cgroup)" if group else "none: no cgroup can be made here"
        report.say(
            f"| host {host} | {resident_bytes(server) / 1e6:.0f} MB | {limit} | {weights_bytes(model) / 1e6:.0f} MB |"
        )
    own_bytes = weights_bytes(repositories.router)
    report.say(f"| router | {resident_bytes(routing) / 1e6:.0f} MB | none | {own_bytes / 1e6:.0f} MB |")
    return hosts, callers


def kill(report: Report, host: "subprocess.Popen[str]", callers: Callers) -> None:
    """Kill a host's tritonserver, and see it come back."""
    before = callers.small_answered()
    (triton,) = psutil.Process(host.pid).children()
    triton.kill()
    wait_for(callers.refused, "a lookup notices")
    time.sleep(0.2)
    lost = callers.window()
    wait_for(lambda: callers.answered(1) > 20 + callers.small_answered() - before, "lookups are answered again")
    back = callers.window()
    (said, _), *_ = lost.errors.most_common()
    report.say(f"Lookups that need it are refused: `{said}`.")
    refused = (lost.errors + back.errors).total()
    report.say(
        f"Meanwhile {callers.small_answered() - before:,} lookups of the router's tables were answered. "
        f"`tbe-serve run` restarted the host: {refused:,} lookups were refused, "
        f"{lost.wrong + back.wrong} answers were wrong."
    )


def roll_out(report: Report, repositories: Repositories, places: Sequence[Place], callers: Callers) -> None:
    """Publish version 2 and release it: hosts before the router."""
    began = time.monotonic()
    repositories.export(2)
    exported_s = time.monotonic() - began
    repositories.distribute(2)
    callers.window()
    repositories.release_on_hosts(1, 2)
    for machine, model in zip(places, repositories.hosts, strict=True):
        wait_for(partial(serves, machine, model.name, 2), f"{model.name} 2")
    repositories.release_on_router(2)
    wait_for(lambda: callers.answered(2), "the router's version 2")
    time.sleep(5)
    repositories.release_on_hosts(2)
    time.sleep(5)
    report.say(
        f"Exported in {exported_s:.0f} s. Hosts loaded it beside version 1, then the router, then the hosts "
        "unloaded version 1."
    )
    report.say(f"Meanwhile: {callers.window().line()}. Every answer is all of one version.")


def wait_for(holds: Callable[[], object], what: str) -> None:
    """Until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.05)


def serves(machine: Place, model: str, version: int) -> bool:
    """Whether a version of a host's model answers."""
    with grpc.insecure_channel(f"{machine.address}:8401") as channel, suppress(grpc.RpcError):
        request = ModelReadyRequest(name=model, version=str(version))
        return bool(unary(channel, "ModelReady")(request, timeout=5).ready)
    return False


def main() -> None:
    """Make machines where root allows it, and run the demo on them. SIGTERM removes them, too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    if os.geteuid() != 0:
        print("not root: servers run on loopback addresses, without namespaces of their own")
        places = [Place(f"127.0.0.{2 + host}") for host in range(HOSTS)]
        run(places, Place("127.0.0.1"), "on loopback addresses of one machine")
        return
    with lan(1 + HOSTS) as network:
        machines = json.dumps([[machine.name, machine.address] for machine in network.machines])
        command = [*network.machines[0].within, sys.executable, "-m", "examples.hosts.demo", network.bridge, machines]
        with subprocess.Popen(command) as process:
            try:
                code = process.wait()
            finally:
                process.terminate()
    raise SystemExit(code)


def on_machines(bridge: str, machines: str) -> None:
    """The demo, in a process on the first of some machines."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    network = Lan(bridge, [Machine(*fields) for fields in json.loads(machines)])
    places = [Place(machine.address, machine.within) for machine in network.machines[1:]]
    run(places, Place("127.0.0.1"), "each in a network namespace of its own")


if __name__ == "__main__":
    if sys.argv[1:]:
        on_machines(*sys.argv[1:])
    else:
        main()
