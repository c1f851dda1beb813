"""What all ranks without hosts have in common."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Never


class RanksWithoutHosts:
    """The base of ranks without hosts: `serving.ranks.Ranks` without the program, `answer` and `close`.

    Attributes:
        counts, replicas, host_times: empty, because there are no hosts.
    """

    counts: Mapping[int, Never] = MappingProxyType({})
    replicas: Sequence[Never] = ()
    host_times: Sequence[Never] = ()

    def watch_replicas(self, period_s: float) -> None:
        """Do nothing: there are no hosts."""

    def check(self) -> None:
        """Do nothing: there are no hosts."""
