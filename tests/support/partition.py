"""Two servers, of which one falls silent: run as root of a network namespace of its own.

    unshare --net python -m tests.support.partition REPOSITORY FOLDER

Prints a JSON line for each kind of client: how many lookups failed between the first packet that was dropped and the
first of SUCCESSES that succeeded in a row. Exits with 1 if that does not come.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from serving.client import AsyncLookupClient, LookupClient
from serving.errors import ServingError
from serving.server import Access, Server, run_server
from tests.support.servers import FREE, metric

MODEL = "m"
HOSTS = ("127.0.0.2", "127.0.0.3")
# A lookup takes milliseconds: this leaves time to a machine that is busy with other things.
TIMEOUT_S = 2.0
SUCCESSES = 40
PATIENCE_S = 120.0
Lookup = Callable[[], object]


def main(repository: Path, folder: Path) -> None:
    """Partition the servers from each kind of client."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(run_server(repository, FREE, access=Access(host=host), log=folder / f"{host}.log"))
            for host in HOSTS
        ]
        for clients in (lookups, asyncio_lookups):
            with clients([server.grpc for server in servers]) as lookup:
                print(json.dumps({"clients": clients.__name__, "failed": around_a_partition(lookup, servers[1])}))


@contextmanager
def lookups(addresses: list[str]) -> Iterator[Lookup]:
    """By LookupClient."""
    with LookupClient(addresses, MODEL, TIMEOUT_S) as client:
        yield lambda: client.lookup({"x": [[1]]})


@contextmanager
def asyncio_lookups(addresses: list[str]) -> Iterator[Lookup]:
    """By AsyncLookupClient."""

    async def make_client() -> AsyncLookupClient:
        return AsyncLookupClient(addresses, MODEL, TIMEOUT_S)

    with asyncio.Runner() as runner:
        client = runner.run(make_client())
        yield lambda: runner.run(client.lookup({"x": [[1]]}))
        runner.run(client.close())


def around_a_partition(lookup: Lookup, server: Server) -> int:
    """How many lookups fail until none does, although `server` is silent. Before and afterwards it is asked, too."""
    until_asked(server, lookup)
    with silence(server.grpc.partition(":")[0]):
        failed = in_a_row = 0
        end = time.monotonic() + PATIENCE_S
        while in_a_row < SUCCESSES:
            if time.monotonic() > end:
                raise SystemExit(f"{failed} lookups failed in {PATIENCE_S:g} s, the last ones too")
            succeeded = succeeds(lookup)
            failed += not succeeded
            in_a_row = in_a_row + 1 if succeeded else 0
    until_asked(server, lookup)
    return failed


def succeeds(lookup: Lookup) -> bool:
    try:
        lookup()
    except ServingError as error:
        print(error, file=sys.stderr)
        return False
    return True


def until_asked(server: Server, lookup: Lookup) -> None:
    """Look up until `server` has answered some more."""

    def answered() -> float:
        return metric(server, "nv_inference_request_success", model=MODEL)

    before, end = answered(), time.monotonic() + PATIENCE_S
    while answered() == before:
        if time.monotonic() > end:
            raise SystemExit(f"{server.grpc} is not asked")
        for _ in range(4):
            succeeds(lookup)


@contextmanager
def silence(host: str) -> Iterator[None]:
    """Drop all that is sent to a host; nobody is told."""
    rule = ("INPUT", "--destination", host, "--jump", "DROP")
    subprocess.run(["iptables", "--append", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "--delete", *rule], check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
