"""Calls to hosts without a router around them: all hosts at once, or one alone."""

from collections.abc import Mapping

from msgspec import structs

from benchmarks.workload import Arrays
from serving.bundle.manifest import Manifest
from serving.bundle.plan import HostBundle
from serving.bundle.segments import planned_host
from serving.client.connection import Connection
from serving.client.retries import Retries
from serving.closing import Closing
from serving.engine import Engine
from serving.errors import ServingError
from serving.requests.accept import accept
from serving.requests.merge import merge
from serving.requests.types import Tensors
from serving.requests.validate import validate
from serving.router.calls import HostCallers, wait_all
from serving.router.host import Host
from serving.router.messages import PartialRequest
from serving.router.replicas import LoopThread
from serving.router.router_ranks import RouterRanks

# What hosts are asked for one request, by rank.
Asked = Mapping[int, PartialRequest]


def asked_of(engine: Engine, request: Arrays) -> Asked:
    """What a router's engine asks its hosts for a request."""
    assert isinstance(engine.ranks, RouterRanks)
    checked = validate([accept(engine.schema, Tensors(None, request.values, request.lengths))])
    return engine.ranks.split(merge(engine.schema, checked)).to_send


class FanOut(Closing):
    """Sends what a router's engine would send, and reads the answers.

    Args:
        engine: the router's.
        addresses: of its hosts, by their number.
        model: the model that is asked, which lies beside that of each host. None: the host's own.
    """

    def __init__(self, engine: Engine, addresses: Mapping[int, str], model: str | None = None) -> None:
        manifest = engine.bundle.manifest
        by_host = {host.host: host for host in manifest.hosts}
        if model is not None:
            by_host = {number: structs.replace(host, model=model, version=1) for number, host in by_host.items()}
        ranks = enumerate(manifest.plan.ranks)
        hosts_by_rank = {number: by_host[rank.host] for number, rank in ranks if rank.host in by_host}
        self._loop = LoopThread()
        hosts = self._loop.start(_connect(manifest, hosts_by_rank, addresses)).result()
        self._callers = HostCallers(hosts, self._loop)

    @property
    def ranks(self) -> list[int]:
        """Of the hosts."""
        return list(self._callers.by_rank)

    def __call__(self, requests: Asked) -> None:
        """Ask all at once that `asked` names."""
        answers = wait_all(self._callers.ask(requests))
        for answer in answers.values():
            if isinstance(answer, ServingError):
                raise answer

    def close(self) -> None:
        """Close the channels, and end the thread."""
        self._callers.close()
        for caller in self._callers.by_rank.values():
            self._loop.start(caller.host.close()).result()
        self._loop.close()


async def _connect(
    manifest: Manifest, hosts: Mapping[int, HostBundle], addresses: Mapping[int, str]
) -> dict[int, Host]:
    return {
        rank: Host(
            host,
            planned_host(manifest, host.host),
            Connection(addresses=[addresses[host.host]], timeout_s=20.0, retries=Retries(attempts=1)),
        )
        for rank, host in hosts.items()
    }
