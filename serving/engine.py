"""A loaded bundle that answers lookups in this process, no server needed."""

import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from serving.arguments import check_argument
from serving.bundle.manifest import MANIFEST
from serving.bundle.opening import Bundle, open_bundle
from serving.bundle.use import hold
from serving.closing import Closing
from serving.dense_part import DenseProgram
from serving.errors import ConfigurationError, InvalidRequest, Reason
from serving.model.settings import ServingSettings
from serving.ranks.answered import Answered, failed_of
from serving.ranks.here import Here
from serving.ranks.hosts import Hosts
from serving.ranks.routed import Routed
from serving.ranks.weights import Weights, WeightsMemory
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


class Engine(Closing):
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

    Attributes:
        bundle: as given.
        schema: the features that requests are checked against.
        weights: its files of weights.
        ranks: where partial sums come from.

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
        ServingSettings(threads=threads)
        check_argument("memory", memory, WeightsMemory)
        given = _hosts_of(bundle, hosts)
        self.bundle = bundle
        self.weights = Weights(bundle.path, bundle.manifest, memory, processes)
        self.ranks: Here | Routed = (
            Here(bundle, self.weights, threads) if given is None else Routed(bundle, self.weights, given, patience_s)
        )
        # Weights may be links into another bundle. `tbe-export prune` has to leave that one alone, too.
        linked = {(bundle.path / name).resolve().parent for name in bundle.manifest.mapped_files}
        for folder in {bundle.path, *(each for each in linked if (each / MANIFEST).exists())}:
            weakref.finalize(self, os.close, hold(folder))
        part = bundle.manifest.dense_part
        self._dense = None if part is None else DenseProgram(bundle, part)
        self.schema = Schema.of(bundle.manifest, IdMaps.of(bundle.path, bundle.manifest))
        self._weighted_keys = bundle.manifest.weighted_keys

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
        given = hosts if hosts is None or isinstance(hosts, Hosts) else Hosts(addresses=hosts)
        engine = cls(open_bundle(Path(path)), given, threads=threads, memory=memory)
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
        return self._looked_up(encode(features, self._weighted_keys, once))

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
        found: Embeddings = self._looked_up(encode_rows(table, ids, weighted=self.schema.weighted))[table].values
        return found

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
        part = self.bundle.manifest.dense_part
        if part is None:
            raise InvalidRequest(f"{self.bundle.path}: has no scores: export the model with --scores")
        tensors = encode(features, self._weighted_keys, once)
        names = [each.name for each in part.outputs]
        return self.outputs(replace(tensors, outputs=names, dense=encode_dense(dense)))

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
        batches, answers = self._answered(checked)
        (outputs,) = outputs_of(checked, batches, answers)
        return outputs if self._dense is None else {**outputs, **self.score_batch(batches, answers).get(0, {})}

    def run(self, batches: Sequence[Batch]) -> list[Answered]:
        """Look batches up: one TBE call for each, and each rank."""
        return self.ranks.answer(batches)

    def score_batch(self, batches: Sequence[Batch], answers: Sequence[Embeddings]) -> dict[int, Outputs]:
        """The scores of those requests that ask for some, made of the first batch; see `DenseProgram.score_batch`."""
        return self._dense.score_batch(batches[0], answers[0]) if self._dense is not None and batches else {}

    def _checked(self, tensors: Tensors) -> Checked:
        """One request, checked; raises InvalidRequest."""
        request = accept(self.schema, tensors)
        try:
            checked = kjt.check([request])
        except InvalidRequest:
            request, _ = kjt.apply_id_policies(request)
            checked = kjt.check([request])
        return checked

    def _answered(self, checked: Checked) -> tuple[Sequence[Batch], list[Embeddings]]:
        """What is looked up for one request, and the answers to that; raises HostUnavailable."""
        batches = batches_of(self.schema, checked)
        answered = self.run(batches)
        for error in failed_of(answered).values():
            raise error
        return batches, [each.embeddings for each in answered]

    def _looked_up(self, tensors: Tensors) -> dict[str, Any]:
        """The answer to one request, by feature: nothing is copied."""
        checked = self._checked(tensors)
        batches, answers = self._answered(checked)
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
