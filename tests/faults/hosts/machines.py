"""Make the machines, and run the faults of hosts on them."""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil

from examples.hosts.network import lan
from tests.faults.hosts.fleet import REPLICAS

# What a host with its replicas may take, in bytes.
HOST_BYTES = 2 << 30


def lines() -> Iterator[str]:
    """The figures, from a process on the router's machine; why there are none, without root."""
    if os.geteuid() != 0:
        yield "hosts on machines of their own: skipped, which needs root"
        return
    hosts = 4 if psutil.virtual_memory().available > 6 * HOST_BYTES else 2
    with lan(1 + hosts * REPLICAS) as network:
        names = [f"{machine.name}={machine.address}" for machine in network.machines]
        command = [*network.machines[0].within, sys.executable, "-m", "tests.faults.hosts", network.bridge, *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.rstrip()
            finally:
                process.terminate()
        assert process.returncode == 0, f"hosts: exited with {process.returncode}"
