"""A loaded bundle that answers lookups in this process, no server needed."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from serving.arguments import check_argument
from serving.bundle.opening import Bundle, open_bundle
from serving.closing import AsyncClosing, Closing
from serving.errors import ConfigurationError, InvalidRequest, Reason
from serving.loaded import Loaded
from serving.model.settings import ServingSettings
from serving.ranks.answered import Answered
from serving.ranks.here import Here
from serving.ranks.hosts import Hosts
from serving.ranks.routed import Routed
from serving.ranks.weights import Weights, WeightsMemory
from serving.request.batches import batches_of
from serving.request.dense import NO_DENSE, DenseFeatures
from serving.request.encoding import Features
from serving.request.tensors import EMBEDDINGS, Batch, Embeddings, Outputs, Tensors

# Addresses of each host of a router's plan, by its number; see `Hosts`.
Addresses = Mapping[int, str | Sequence[str]]


class Engine(Loaded, Closing):
    """The program of an opened bundle over its memory-mapped weights, and over its hosts where it has some.

    Engines on one bundle, in any number of processes, share one copy of the weights, in the page cache. Several
    threads must not use one engine at once.

    Args:
        bundle: the bundle.
        hosts: where the hosts of its plan are. Only a router's bundle has hosts.
        patience_s: how long hosts are waited for that do not answer yet, in seconds. None: they are not asked whether
            they have their bundles.
        threads: as `open`.
        memory: as `open`.
        processes: how many have the bundle loaded on this machine, this one among them. Memory has to hold them, too.

    Raises:
        As `open`.
    """

    def __init__(
        self,
        bundle: Bundle,
        hosts: Hosts | None = None,
        patience_s: float | None = 0.0,
        *,
        threads: int = 1,
        memory: WeightsMemory = WeightsMemory.MAPPED,
        processes: int = 1,
    ) -> None:
        _check(threads, memory)
        given = _hosts_of(bundle, hosts)
        weights = Weights(bundle.path, bundle.manifest, memory, processes)
        ranks: Here | Routed = (
            Here(bundle, weights, threads) if given is None else Routed.open(bundle, weights, given, patience_s)
        )
        super().__init__(bundle, weights, ranks)

    @classmethod
    def open(
        cls,
        path: Path | str,
        hosts: Hosts | Addresses | None = None,
        *,
        threads: int = 1,
        memory: WeightsMemory = WeightsMemory.MAPPED,
    ) -> "Engine":
        """Load the bundle at `path`. The time does not depend on the size of its tables.

        Its files are brought into memory meanwhile, in huge pages where the kernel can, unless they are larger than
        that. Nothing compares them with their digests: `serving.bundle.verify_digests` does. `tbe-export prune`
        leaves the bundle alone while the engine lives.

        Args:
            path: the bundle, <model>/<version>.
            hosts: where the hosts of a router's plan are: `Hosts`, or their addresses alone, such as
                {0: ["a:8001", "b:8001"], 1: "dns:///movies-host-1:8001"}.
            threads: how many look a large request up, the one that calls among them. Answers are the same, bit for
                bit. They sleep between large requests. A router's own rank is looked up by one.
            memory: where its weights lie. Where they have to be copied, the time depends on their size.

        Raises:
            BundleError: the bundle cannot be opened (see `serving.bundle.opening.open_bundle`) or mapped.
            EnvironmentMismatch: torch and FBGEMM do not work together.
            ConfigurationError: `hosts` does not fit the bundle, `threads` is no number from 1 to 1024, or the machine
                cannot keep the weights where they are to lie.
            HostUnavailable: naming each host that lacks its bundle, or does not answer.
        """
        engine = cls(open_bundle(Path(path)), _as_hosts(hosts), threads=threads, memory=memory)
        engine.weights.populate()
        return engine

    def close(self) -> None:
        """Close the connections to hosts, end threads, and let the weights go."""
        self.ranks.close()
        self.weights.close()

    def lookup(self, features: Features, *, once: Collection[str] = ()) -> dict[str, Any]:
        """Look up the embeddings of some features.

        Args:
            features: ids by feature (TorchRec's KJT key), in any form that `serving.request.encoding.encode` takes.
            once: the features that have one bag, whatever the number of samples: their answers are [1, dim].

        Returns:
            {feature: [B, dim]}, in the order of `features` and the bundle's output dtype, float32 or float16; for a
            feature of an EmbeddingCollection a `serving.request.sequence.Sequence` of rows instead. Where several
            tables read a key, their answers are called `key@table`, as TorchRec calls them.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
            HostUnavailable: naming the host that does not answer, and the tables there.
        """
        return self._looked_up(self._encoded(features, once))

    def rows(self, table: str, ids: npt.ArrayLike) -> Embeddings:
        """Rows of a table. Weights, also those by position, do not count.

        Args:
            table: its name.
            ids: integers [n].

        Returns:
            [n, dim] in the bundle's output dtype, float32 or float16.

        Raises:
            InvalidRequest, HostUnavailable: as `lookup`. What happens to an id outside the table its id policy says:
                `zero` gives a row of zeros.
        """
        found: Embeddings = self._looked_up(self._encoded_rows(table, ids))[table].values
        return found

    def _looked_up(self, tensors: Tensors) -> dict[str, Any]:
        checked = self._checked(tensors)
        batches = batches_of(self.schema, checked)
        return self._by_feature(tensors, checked, batches, self.run(batches))

    def score(self, features: Features, dense: DenseFeatures = NO_DENSE, *, once: Collection[str] = ()) -> Outputs:
        """What the whole model answers, from ids and dense inputs. The bundle was exported with scores.

        Args:
            features: ids of all features, as `lookup` takes them.
            dense: the dense inputs of the model's forward by name, [B, width] each.
            once: the features that have one bag, and dense inputs that have one row, which count for all samples.

        Returns:
            {output: float32 [B, …]}.

        Raises:
            InvalidRequest: naming the feature or input, what was expected and what came; or the bundle has no scores.
            HostUnavailable: as `lookup`.
        """
        return self.outputs(self._for_scores(features, dense, once))

    def answer(self, tensors: Tensors) -> Embeddings:
        """Answer one request for features that are pooled.

        Returns:
            Its features side by side: [B, D] in the bundle's output dtype, float32 or float16.

        Raises:
            InvalidRequest, HostUnavailable: as `lookup`; also: none of the features is pooled.
        """
        outputs = self.outputs(tensors)
        if EMBEDDINGS not in outputs:
            raise InvalidRequest("expected a feature that is pooled, got none", Reason.FEATURES)
        return outputs[EMBEDDINGS]

    def outputs(self, tensors: Tensors) -> Outputs:
        """Answer one request: its outputs by name, as they travel, without the leading 1.

        Raises:
            InvalidRequest, HostUnavailable: as `lookup`.
        """
        checked = self._checked(tensors)
        batches = batches_of(self.schema, checked)
        return self._outputs(checked, batches, self.run(batches))

    def run(self, batches: Sequence[Batch]) -> list[Answered]:
        """Look batches up: one TBE call for each, and each rank."""
        return self.ranks.answer(batches)


class AsyncEngine(Loaded, AsyncClosing):
    """Engine for asyncio: while hosts are asked, others may run. `open` makes one, in the loop that uses it."""

    @classmethod
    async def open(
        cls,
        path: Path | str,
        hosts: Hosts | Addresses | None = None,
        *,
        threads: int = 1,
        memory: WeightsMemory = WeightsMemory.MAPPED,
    ) -> "AsyncEngine":
        """As `Engine.open`."""
        _check(threads, memory)
        bundle = open_bundle(Path(path))
        given = _hosts_of(bundle, _as_hosts(hosts))
        weights = Weights(bundle.path, bundle.manifest, memory)
        ranks: Here | Routed
        if given is None:
            ranks = Here(bundle, weights, threads)
        else:
            ranks = await Routed.open_async(bundle, weights, given, 0.0)
        weights.populate()
        return cls(bundle, weights, ranks)

    async def lookup(self, features: Features, *, once: Collection[str] = ()) -> dict[str, Any]:
        """As `Engine.lookup`."""
        return await self._looked_up(self._encoded(features, once))

    async def score(
        self, features: Features, dense: DenseFeatures = NO_DENSE, *, once: Collection[str] = ()
    ) -> Outputs:
        """As `Engine.score`."""
        checked = self._checked(self._for_scores(features, dense, once))
        batches = batches_of(self.schema, checked)
        return self._outputs(checked, batches, await self.ranks.answer_async(batches))

    async def rows(self, table: str, ids: npt.ArrayLike) -> Embeddings:
        """As `Engine.rows`."""
        found: Embeddings = (await self._looked_up(self._encoded_rows(table, ids)))[table].values
        return found

    async def _looked_up(self, tensors: Tensors) -> dict[str, Any]:
        checked = self._checked(tensors)
        batches = batches_of(self.schema, checked)
        return self._by_feature(tensors, checked, batches, await self.ranks.answer_async(batches))

    async def close(self) -> None:
        """As `Engine.close`."""
        await self.ranks.close_async()
        self.weights.close()


def _check(threads: int, memory: WeightsMemory) -> None:
    """Refuse threads that the setting may not have, and what is no memory."""
    ServingSettings(threads=threads)
    check_argument("memory", memory, WeightsMemory)


def _as_hosts(hosts: Hosts | Addresses | None) -> Hosts | None:
    return hosts if hosts is None or isinstance(hosts, Hosts) else Hosts(addresses=hosts)


def _hosts_of(bundle: Bundle, hosts: Hosts | None) -> Hosts | None:
    """The hosts of a bundle; None where it has all ranks itself.

    Raises:
        ConfigurationError: there are hosts for a bundle that has none.
    """
    if not bundle.manifest.hosts:
        if hosts is not None and hosts.addresses:
            raise ConfigurationError(
                f"{bundle.path}: expected no hosts: all its ranks are in the bundle: leave them out (`tbe-serve "
                "configure --no-hosts`)"
            )
        return None
    return hosts or Hosts(addresses={})
