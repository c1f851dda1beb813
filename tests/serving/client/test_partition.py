"""A server that falls silent, without a word to its clients (`tests/support/partition.py` in a network namespace)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.promise("Clients of two servers continue with the other server when one falls silent")
def test_clients_go_elsewhere_when_a_server_falls_silent(one_model: Path, tmp_path: Path) -> None:
    namespace = ("unshare", "--net", *(() if os.getuid() == 0 else ("--user", "--map-root-user")))
    command = [*namespace, sys.executable, "-m", "tests.support.partition", str(one_model), str(tmp_path)]
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}  # iptables, where only root looks
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["clients"] for report in reports] == ["lookups", "asyncio_lookups"]
