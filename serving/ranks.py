"""The interface of ranks, local or remote.

A rank holds shards. All ranks of a bundle may be in this process (`serving.lookup`), or all but the router's own rank
on other hosts (`serving.router`). Ranks on another device would be another class with these methods, derived from
`serving.lookup.ranks_without_hosts.RanksWithoutHosts`, and a line in `open_ranks`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from serving.bundle.load import Bundle
from serving.lookup.batch_answer import BatchAnswer
from serving.lookup.local_ranks import LocalRanks
from serving.lookup.program import LoadedProgram
from serving.requests.batches import Batch
from serving.router.calls import HostTime
from serving.router.host import HostCounts
from serving.router.hosts_config import HostsConfig
from serving.router.replicas import HostReplicas
from serving.router.router_ranks import RouterRanks
from serving.tables.table_files import TableFiles


class Ranks(Protocol):
    """Answers batches with pooled embeddings. Only one thread at a time may use it."""

    @property
    def loaded_program(self) -> LoadedProgram:
        """The program, and how this process runs it. The backend logs its form; only the ranks call it."""

    @property
    def counts(self) -> Mapping[int, HostCounts]:
        """The counts of the calls to each host, by its number; empty without hosts."""

    @property
    def replicas(self) -> Sequence[HostReplicas]:
        """The last result of `watch_replicas`."""

    @property
    def host_times(self) -> Sequence[HostTime]:
        """When the host calls of the last traced `answer` began and ended."""

    def answer(self, batches: Sequence[Batch]) -> list[BatchAnswer]:
        """Look up each batch. A request that needs a lost host is in `BatchAnswer.lost`."""

    def watch_replicas(self, period_s: float) -> None:
        """Check every `period_s` seconds which replicas of the hosts can answer."""

    def check(self) -> None:
        """Check that every host answers.

        Raises:
            HostUnavailable: a host lacks its bundle, or does not answer. The message names all such hosts.
        """

    def close(self) -> None:
        """Close connections and end threads."""


def open_ranks(
    bundle: Bundle, weights: TableFiles, hosts: HostsConfig | None, patience_s: float | None, threads: int
) -> Ranks:
    """The ranks of a bundle.

    Args:
        bundle: the opened bundle.
        weights: its weights files on this machine.
        hosts: the hosts of its plan. None: all ranks are in this process.
        patience_s: how long to wait for hosts that do not answer yet, in seconds. None: hosts are not checked.
        threads: how many threads look up a large batch in this process, the calling one included.

    Raises:
        BundleError: the program cannot be loaded.
        EnvironmentMismatch: torch and FBGEMM do not work together.
        ConfigurationError: `hosts` does not fit the bundle, or certificates cannot be used.
        HostUnavailable: a host lacks its bundle, or does not answer. The message names all such hosts.
    """
    if hosts is None:
        return LocalRanks(bundle, weights, threads)
    return RouterRanks(bundle, weights, hosts, patience_s)
