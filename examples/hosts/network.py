"""Machines on one machine: network namespaces on one bridge, and what happens to their links. Needs root."""

import ctypes
import fcntl
import json
import os
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_DEVICE = "eth0"
_BRIDGE = "lan"
_NETWORK = "10.77.0"
# From <linux/if_tun.h> and <sched.h>.
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
_FRAME_BYTES = 1 << 16


def run(*command: str) -> str:
    """Run a command; what it printed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Machine:
    """A network namespace.

    Attributes:
        name: of the namespace.
        address: its IPv4 address.
    """

    name: str
    address: str

    @property
    def within(self) -> tuple[str, ...]:
        """The command that runs another one there. (`ip netns exec` would hide cgroups, too.)"""
        return ("nsenter", f"--net=/run/netns/{self.name}")

    def run(self, *command: str) -> str:
        """Run a command there; what it printed."""
        return run(*self.within, *command)

    @contextmanager
    def filtered(self, *rules: str) -> Iterator[None]:
        """With rules of iptables, each without --append."""
        for rule in rules:
            self.run("iptables", "--wait", "--append", *rule.split())
        try:
            yield
        finally:
            for rule in rules:
                self.run("iptables", "--wait", "--delete", *rule.split())

    @contextmanager
    def limited(self, rate: str) -> Iterator[None]:
        """What it sends is no faster than so, such as 1gbit."""
        self.run(
            "tc", "qdisc", "add", "dev", _DEVICE, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"
        )
        try:
            yield
        finally:
            self.run("tc", "qdisc", "del", "dev", _DEVICE, "root")


@dataclass(frozen=True)
class Lan:
    """Machines that reach each other."""

    bridge: str
    machines: Sequence[Machine]

    @contextmanager
    def delayed(self, machine: Machine, seconds: float) -> Iterator[None]:
        """What `machine` sends arrives so much later. Its connections stay. Call this in a process on the machine.

        A TAP device takes the place of its link, with the same addresses.
        """
        mac = json.loads(machine.run("ip", "-json", "link", "show", _DEVICE))[0]["address"]
        near, far = _tap("tap-near"), _tap("tap-far", self.bridge)
        run("ip", "-netns", self.bridge, "link", "set", "tap-far", "master", _BRIDGE, "up")
        machine.run("ip", "link", "set", _DEVICE, "down")
        machine.run("ip", "address", "flush", "dev", _DEVICE)
        machine.run("ip", "link", "set", "tap-near", "address", mac, "up")
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "tap-near")
        ended = threading.Event()
        threads = [
            threading.Thread(target=_relay, args=(source, sink, delay_s, ended), daemon=True)
            for source, sink, delay_s in ((near, far, seconds), (far, near, 0.0))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            machine.run("ip", "link", "del", "tap-near")
            run("ip", "-netns", self.bridge, "link", "del", "tap-far")
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", _DEVICE)
            machine.run("ip", "link", "set", _DEVICE, "up")


@contextmanager
def lan(count: int) -> Iterator[Lan]:
    """So many machines, and a bridge in a namespace of its own. All are removed in the end."""
    prefix = f"tbe-{os.getpid()}"
    bridge = f"{prefix}-lan"
    machines = [Machine(f"{prefix}-{number}", f"{_NETWORK}.{number + 1}") for number in range(count)]
    try:
        run("ip", "netns", "add", bridge)
        run("ip", "-netns", bridge, "link", "add", _BRIDGE, "type", "bridge")
        run("ip", "-netns", bridge, "link", "set", _BRIDGE, "up")
        for number, machine in enumerate(machines):
            run("ip", "netns", "add", machine.name)
            port = f"port{number}"
            ends = ("netns", machine.name, "type", "veth", "peer", "name", port, "netns", bridge)
            run("ip", "link", "add", _DEVICE, *ends)
            run("ip", "-netns", bridge, "link", "set", port, "master", _BRIDGE, "up")
            for command in (
                ("ip", "link", "set", "lo", "up"),
                ("ip", "address", "add", f"{machine.address}/24", "dev", _DEVICE),
                ("ip", "link", "set", _DEVICE, "up"),
            ):
                machine.run(*command)
        yield Lan(bridge, machines)
    finally:
        for name in (*(machine.name for machine in machines), bridge):
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


def _tap(name: str, namespace: str | None = None) -> int:
    """A TAP device, in this process's namespace or another; its descriptor."""
    opened: list[int] = []

    def open_() -> None:
        if namespace is not None:  # of this thread alone
            with open(f"/run/netns/{namespace}") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
        opened.append(descriptor)

    thread = threading.Thread(target=open_)
    thread.start()
    thread.join()
    return opened[0]


def _relay(source: int, sink: int, delay_s: float, ended: threading.Event) -> None:
    """Pass frames on in their order, each so much later."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def send() -> None:
        with suppress(OSError):
            while not ended.is_set():
                due, frame = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                os.write(sink, frame)

    threading.Thread(target=send, daemon=True).start()
    with suppress(OSError):
        while not ended.is_set():
            waiting.put((time.monotonic() + delay_s, os.read(source, _FRAME_BYTES)))
