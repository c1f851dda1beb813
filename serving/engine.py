"""A loaded bundle that answers lookups in this process, no server needed."""

import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from serving.bundle.manifest import MANIFEST
from serving.bundle.opening import Bundle, open_bundle
from serving.bundle.use import hold
from serving.closing import AsyncClosing, Closing
from serving.dense_part import DenseProgram
from serving.errors import ConfigurationError, InvalidRequest, Reason
from serving.ranks.answered import Answered
from serving.ranks.here import Here
from serving.ranks.hosts import Hosts
from serving.ranks.routed import Routed
from serving.request import kjt
from serving.request.accept import accept
from serving.request.batches import batches_of, outputs_of
from serving.request.dense import NO_DENSE, DenseFeatures, encode_dense
from serving.request.encoding import Features, decode, encode, encode_rows
from serving.request.id_maps import IdMaps
from serving.request.once import lengths_by_key
from serving.request.schema import Schema
from serving.request.sequence import Sequence as RowSequence
from serving.request.sequences import rows_of
from serving.request.tensors import EMBEDDINGS, Batch, Checked, Embeddings, Outputs, Tensors

# Addresses of each host of a router's plan, by its number; see `Hosts`.
Addresses = Mapping[int, str | Sequence[str]]


class _Engine:
    """What both engines share: requests are checked and made a batch, answers are cut.

    Attributes:
        bundle: the bundle.
        schema: the features that requests are checked against.
        ranks: where partial sums come from.
    """

    def __init__(self, bundle: Bundle, ranks: Here | Routed) -> None:
        self.bundle = bundle
        self.ranks = ranks
        # Weights may be links into another bundle. `tbe-export prune` has to leave that one alone, too.
        linked = {(bundle.path / name).resolve().parent for name in bundle.manifest.mapped_files}
        for folder in {bundle.path, *(each for each in linked if (each / MANIFEST).exists())}:
            weakref.finalize(self, os.close, hold(folder))
        part = bundle.manifest.dense_part
        self._dense = None if part is None else DenseProgram(bundle, part)
        self.schema = Schema.of(bundle.manifest, IdMaps.of(bundle.path, bundle.manifest))
        self._weighted = bundle.manifest.weighted_keys

    def _encoded(self, features: Features, once: Collection[str]) -> Tensors:
        return encode(features, self._weighted, once)

    def _encoded_rows(self, table: str, ids: npt.ArrayLike) -> Tensors:
        return encode_rows(table, ids, weighted=self.schema.weighted)

    def _checked(self, tensors: Tensors) -> Checked:
        """One request, checked.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
        """
        request = accept(self.schema, tensors)
        try:
            checked = kjt.check([request])
        except InvalidRequest:
            request, _ = kjt.apply_id_policies(request)
            checked = kjt.check([request])
        return checked

    def score_batch(self, batches: Sequence[Batch], answers: Sequence[Embeddings]) -> dict[int, Outputs]:
        """The scores of those requests that ask for some, made of the first batch; see `DenseProgram.score_batch`."""
        return self._dense.score_batch(batches[0], answers[0]) if self._dense is not None and batches else {}

    def _for_scores(self, features: Features, dense: DenseFeatures, once: Collection[str]) -> Tensors:
        part = self.bundle.manifest.dense_part
        if part is None:
            raise InvalidRequest(f"{self.bundle.path}: has no scores: export the model with --scores")
        names = [each.name for each in part.outputs]
        return replace(self._encoded(features, once), outputs=names, dense=encode_dense(dense))

    def _outputs(self, checked: Checked, batches: Sequence[Batch], answered: Sequence[Answered]) -> Outputs:
        """The outputs of one request."""
        answers = _only(answered)
        return {**outputs_of(checked, batches, answers)[0], **self.score_batch(batches, answers).get(0, {})}

    def _by_feature(
        self, tensors: Tensors, checked: Checked, batches: Sequence[Batch], answered: Sequence[Answered]
    ) -> dict[str, Any]:
        """The answer to one request, by feature: nothing is copied."""
        answers = _only(answered)
        (request,) = checked.requests
        selection = request.selection
        found: dict[str, Any] = {}
        for batch, answer in zip(batches, answers, strict=True):
            if batch.row_bounds is None:
                found |= decode(answer, dict(zip(batch.selection.names, batch.selection.dims.tolist(), strict=True)))
        rows = rows_of(batches, answers)
        lengths = lengths_by_key(tensors, selection.keys) if rows else {}
        for name, key, position in zip(selection.names, selection.key_of, selection.positions.tolist(), strict=True):
            if (0, position) in rows:
                found[name] = RowSequence(rows[0, position], lengths[key])
        return {name: found[name] for name in selection.names}


class Engine(_Engine, Closing):
    """The program of an opened bundle over its memory-mapped weights, and over its hosts where it has some.

    Engines on one bundle, in any number of processes, share one copy of the weights, in the page cache. Several
    threads must not use one engine at once.

    Args:
        bundle: the bundle.
        hosts: where the hosts of its plan are. Only a router's bundle has hosts.
        patience_s: how long hosts are waited for that do not answer yet, in seconds. None: they are not asked whether
            they have their bundles.

    Raises:
        As `open`.
    """

    def __init__(self, bundle: Bundle, hosts: Hosts | None = None, patience_s: float | None = 0.0) -> None:
        given = _hosts_of(bundle, hosts)
        super().__init__(bundle, Here(bundle) if given is None else Routed.open(bundle, given, patience_s))

    @classmethod
    def open(cls, path: Path | str, hosts: Hosts | Addresses | None = None) -> "Engine":
        """Load the bundle at `path`. The time does not depend on the size of its tables.

        Rows are read from disk when they are looked up, and are not compared with their digests:
        `serving.bundle.verify_digests` does that. `tbe-export prune` leaves the bundle alone while the engine lives.

        Args:
            path: the bundle, <model>/<version>.
            hosts: where the hosts of a router's plan are: `Hosts`, or their addresses alone, such as
                {0: ["a:8001", "b:8001"], 1: "dns:///movies-host-1:8001"}.

        Raises:
            BundleError: the bundle cannot be opened (see `serving.bundle.opening.open_bundle`) or mapped.
            EnvironmentMismatch: torch and FBGEMM do not work together.
            ConfigurationError: `hosts` does not fit the bundle.
            HostUnavailable: naming each host that lacks its bundle, or does not answer.
        """
        return cls(open_bundle(Path(path)), _as_hosts(hosts))

    def close(self) -> None:
        """Close the connections to hosts. An engine without hosts need not be closed."""
        self.ranks.close()

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


class AsyncEngine(_Engine, AsyncClosing):
    """Engine for asyncio: while hosts are asked, others may run. `open` makes one, in the loop that uses it."""

    @classmethod
    async def open(cls, path: Path | str, hosts: Hosts | Addresses | None = None) -> "AsyncEngine":
        """As `Engine.open`."""
        bundle = open_bundle(Path(path))
        given = _hosts_of(bundle, _as_hosts(hosts))
        return cls(bundle, Here(bundle) if given is None else await Routed.open_async(bundle, given, 0.0))

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


def _only(answered: Sequence[Answered]) -> list[Embeddings]:
    """The answers to the batches of one request."""
    for each in answered:
        if each.failed:
            raise each.failed[0]
    return [each.embeddings for each in answered]


def _as_hosts(hosts: Hosts | Addresses | None) -> Hosts | None:
    return hosts if hosts is None or isinstance(hosts, Hosts) else Hosts(addresses=hosts)


def _hosts_of(bundle: Bundle, hosts: Hosts | None) -> Hosts | None:
    """The hosts of a bundle; None where it has all ranks itself.

    Raises:
        ConfigurationError: there are hosts for a bundle that has none.
    """
    if not bundle.manifest.hosts:
        if hosts is not None and hosts.addresses:
            raise ConfigurationError(f"{bundle.path}: expected no hosts: all its ranks are in the bundle")
        return None
    return hosts or Hosts(addresses={})
