"""The engine: a loaded bundle that answers lookups and scores in this process, without a server."""

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy.typing as npt

from serving.arguments import check_argument
from serving.bundle.load import Bundle, hold, open_bundle
from serving.bundle.manifest import MANIFEST
from serving.closing import Closing
from serving.errors import ConfigurationError, InvalidRequest, ServingError
from serving.lookup.batch_answer import BatchAnswer, failed_of
from serving.lookup.dense_program import DenseProgram
from serving.model.settings import ServingSettings, WeightsMemory
from serving.ranks import open_ranks
from serving.requests.accept import accept
from serving.requests.answer_columns import AnswerColumns
from serving.requests.answers import JaggedRows, decode
from serving.requests.batches import Batch, PooledBatch, unmerge, unmerge_rows
from serving.requests.chunks import cut, engine_chunk_limits
from serving.requests.dense_inputs import NO_DENSE, DenseFeatures, encode_dense
from serving.requests.encoding import Features, encode, encode_rows
from serving.requests.id_maps import IdMaps
from serving.requests.input_forms import Nulls
from serving.requests.layout import lengths_by_id, lengths_by_key
from serving.requests.merge import merge_all
from serving.requests.schema import LookupSchema, ScoringSchema, schema_of
from serving.requests.streams import (
    Errors,
    Method,
    SamplesDone,
    answer_batches,
    answer_chunks,
    check_stream,
    features_and_dense,
)
from serving.requests.types import Embeddings, KjtRequest, Outputs, Tensors, ValidatedRequests
from serving.requests.validate import validate_each
from serving.router.hosts_config import HostsConfig
from serving.tables.table_files import TableFiles

# Addresses of each host of a router's plan, by its number; see `HostsConfig`.
Addresses = Mapping[int, str | Sequence[str]]
# The outcome of a request: its outputs, or the error.
Outcome = Outputs | ServingError


@dataclass(eq=False, slots=True)
class GroupAnswer:
    """The outcomes of requests that are answered together.

    Attributes:
        validated: the valid requests, which are looked up.
        positions: their positions among all requests.
        errors: the errors of invalid requests, by position among all requests.
        ids_outside: the number of ids of valid requests that were outside [0, rows), by table.
        batches: the batches that are looked up.
        answers: the answer of the ranks to each batch.
        scores: the scores by output of requests for scores, by position in `validated`.
        times: when the requests had been validated, merged, looked up and scored, in seconds of `perf_counter`.
    """

    validated: ValidatedRequests
    positions: Sequence[int]
    errors: dict[int, ServingError]
    ids_outside: Mapping[str, int]
    batches: Sequence[Batch]
    answers: Sequence[BatchAnswer]
    scores: Mapping[int, Outputs]
    times: Sequence[float]

    def outcomes(self) -> list[Outcome]:
        """For each request, its outputs by name, as sent but without the leading dimension of 1; or its error."""
        if not self.errors:
            return [*self.outputs()]
        outcomes: dict[int, Outcome] = dict(zip(self.positions, self.outputs(), strict=True))
        outcomes |= self.errors
        return [outcomes[position] for position in range(len(outcomes))]

    def outputs(self) -> list[Outputs]:
        """The outputs of each valid request. They are incomplete if a host is lost."""
        outputs = unmerge(self.validated, self.batches, [answer.embeddings for answer in self.answers])
        if self.scores:
            return [{**looked_up, **self.scores.get(number, {})} for number, looked_up in enumerate(outputs)]
        return outputs

    def by_feature(self, tensors: Tensors) -> dict[str, Any]:
        """The answer to the only request, `tensors`, by feature: [B, dim], or Rows. Nothing is copied."""
        (request,) = self.validated.requests
        features = request.feature_set
        by_feature: dict[str, Any] = {}
        for batch, answer in zip(self.batches, self.answers, strict=True):
            if isinstance(batch, PooledBatch):
                dims = dict(zip(batch.feature_set.names, batch.feature_set.dims.tolist(), strict=True))
                by_feature |= decode(answer.embeddings, dims)
        if len(by_feature) < len(features.names):
            rows = unmerge_rows(self.batches, [answer.embeddings for answer in self.answers])
            lengths = lengths_by_key(tensors, features.keys)
            for name, key, position in zip(features.names, features.key_of, features.positions.tolist(), strict=True):
                if name not in by_feature:
                    by_feature[name] = JaggedRows(rows[0, position], lengths[key])
        return {name: by_feature[name] for name in features.names}


def answer(
    schema: LookupSchema,
    requests: Sequence[KjtRequest],
    look_up: Callable[[Sequence[Batch]], Sequence[BatchAnswer]],
    dense: DenseProgram | None = None,
) -> GroupAnswer:
    """Answer requests together: check them, merge them into batches, look these up, and score.

    Args:
        schema: the schema that accepted the requests.
        requests: at least one request.
        look_up: returns the answers of the ranks to batches.
        dense: the dense part, which computes scores.
    """
    validated, positions, errors, ids_outside = validate_each(requests)
    validated_at = perf_counter()
    batches = merge_all(schema, validated)
    merged_at = perf_counter()
    answers = look_up(batches)
    looked_up_at = perf_counter()
    scores = {} if dense is None else dense.score_all(validated, batches, [answer.embeddings for answer in answers])
    times = validated_at, merged_at, looked_up_at, perf_counter()
    for number, error in failed_of(answers).items():
        errors[positions[number]] = error
    return GroupAnswer(validated, positions, errors, ids_outside, batches, answers, scores, times)


class Engine(Closing):
    """Answers lookups and requests for scores by an opened bundle, over its memory-mapped weights and its hosts.

    Engines on one bundle, in any number of processes, share one copy of the weights in the page cache. An engine must
    not be used by several threads at once.

    Args:
        bundle: the bundle.
        hosts: the hosts of a router's bundle.
        patience_s: how long to wait for hosts that do not answer yet, in seconds. None: do not check whether hosts
            have their bundles.
        threads: as for `open`.
        memory: as for `open`.
        processes: the number of processes on this machine that load the bundle, this one included, whose memory is
            reserved beside the weights.

    Attributes:
        bundle: as the argument.
        schema: the features that requests are validated against.
        table_files: the mapped weights.
        ranks: the ranks, which answer batches.
        lookup_program: the program that looks rows up, and how this process runs it.
        dense_part: the dense part, and the file that it was loaded from. None: the bundle has no scores.

    Raises:
        As for `open`.
    """

    def __init__(
        self,
        bundle: Bundle,
        hosts: HostsConfig | None = None,
        patience_s: float | None = 0.0,
        *,
        threads: int = 1,
        memory: WeightsMemory = WeightsMemory.MAPPED,
        processes: int = 1,
    ) -> None:
        ServingSettings(threads=threads)
        check_argument("memory", memory, WeightsMemory)
        if not isinstance(bundle, Bundle):
            raise ConfigurationError(f"bundle: expected a Bundle, got {bundle!r:.200}: Engine.open takes its path")
        hosts_config = _hosts_of(bundle, hosts)
        self.bundle = bundle
        self.table_files = TableFiles(bundle.path, bundle.manifest, memory, processes)
        self.ranks = open_ranks(bundle, self.table_files, hosts_config, patience_s, threads)
        self.lookup_program = self.ranks.loaded_program
        # Weights may be links into another bundle, which `tbe-export prune` must not remove either.
        linked = {(bundle.path / name).resolve().parent for name in bundle.manifest.mapped_files}
        for folder in {bundle.path, *(folder for folder in linked if (folder / MANIFEST).exists())}:
            weakref.finalize(self, os.close, hold(folder))
        schema = schema_of(bundle.manifest, IdMaps.of(bundle.path, bundle.manifest))
        self._dense = DenseProgram(bundle, schema) if isinstance(schema, ScoringSchema) else None
        self.schema = schema if self._dense is None else self._dense.schema
        self.dense_part = None if self._dense is None else self._dense.loaded
        self._weighted_keys = bundle.manifest.weighted_keys

    @classmethod
    def open(
        cls,
        path: Path | str,
        hosts: HostsConfig | Addresses | None = None,
        *,
        threads: int = 1,
        memory: WeightsMemory = WeightsMemory.MAPPED,
    ) -> "Engine":
        """Load the bundle at `path`. The time does not depend on the size of its tables.

        In the background, the weights are read into memory, in huge pages if the kernel supports them, unless they
        are larger than memory. They are not compared with their digests; `serving.bundle.verify_digests` does that.
        `tbe-export prune` does not remove the bundle while the engine exists.

        Args:
            path: the folder of the bundle, <model>/<version>.
            hosts: the hosts of a router's bundle: `HostsConfig`, or only their addresses, such as
                {0: ["a:8001", "b:8001"], 1: "dns:///movies-host-1:8001"}.
            threads: the number of threads that look up a large request, the calling one included. They sleep between
                large requests. Answers do not depend on the number, bit for bit. A router's own rank uses one thread.
            memory: where the weights are held. If they have to be copied, the time depends on their size.

        Raises:
            BundleError: the bundle cannot be opened (see `serving.bundle.load.open_bundle`) or mapped.
            EnvironmentMismatch: torch and FBGEMM do not work together.
            ConfigurationError: `hosts` does not fit the bundle, `threads` is not a number from 1 to 1024, or the
                machine cannot hold the weights as `memory` says.
            HostUnavailable: a host lacks its bundle, or does not answer. The message names all such hosts.
        """
        hosts_config = hosts if hosts is None or isinstance(hosts, HostsConfig) else HostsConfig(addresses=hosts)
        engine = cls(open_bundle(Path(path)), hosts_config, threads=threads, memory=memory)
        engine.table_files.populate()
        return engine

    def close(self) -> None:
        """Close the connections to hosts, end threads, and release the weights."""
        self.ranks.close()
        self.table_files.close()

    # `Features` and `DenseFeatures` are quoted: help() shows these names, not the long unions.

    def lookup(
        self, features: "Features", *, shared: Collection[str] = (), nulls: Nulls = "refuse"
    ) -> AnswerColumns[Any]:
        """Look up the embeddings of some features.

        Args:
            features: ids by feature (TorchRec's KJT key), in any form that `serving.requests.encoding.encode` takes:
                lists, arrays, columns, or a DataFrame, whose other columns are ignored.
            shared: the features with one bag for all samples. Their answers are [1, dim].

        Returns:
            {feature: [B, dim]}, in the order of `features` and the bundle's output dtype, float32 or float16. A
            feature of an EmbeddingCollection has a `serving.requests.answers.JaggedRows`. If several tables read a
            key, their answers are called `key@table`, as in TorchRec.

        Raises:
            InvalidRequest: the input cannot be looked up. The message names the feature, and what was expected.
            HostUnavailable: a host does not answer. The message names it, and its tables.
        """
        tensors = self._encoded(features, shared, nulls)
        return AnswerColumns(self._answered(tensors).by_feature(tensors))

    def rows(self, table: str, ids: npt.ArrayLike) -> Embeddings:
        """Rows of a table, without per-id weights and position weights.

        Args:
            table: the name of the table.
            ids: integers [n]. The id policy of the table applies: with `zero`, an id outside gives a row of zeros.

        Returns:
            [n, dim] in the bundle's output dtype, float32 or float16.

        Raises:
            InvalidRequest, HostUnavailable: as for `lookup`.
        """
        tensors = encode_rows(table, ids, weighted=self.schema.weighted)
        rows: JaggedRows = self._answered(tensors).by_feature(tensors)[table]
        return rows.values

    def score(
        self,
        features: "Features",
        dense: "DenseFeatures" = NO_DENSE,
        *,
        shared: Collection[str] = (),
        nulls: Nulls = "refuse",
    ) -> AnswerColumns[Any]:
        """The scores of the whole model for ids and dense inputs. The bundle must have been exported with scores.

        Args:
            features: ids of all features, as for `lookup`. A DataFrame may also have the dense inputs.
            dense: the dense inputs of the model's forward by name, [B, *shape] each.
            shared: the features with one bag, and the dense inputs with one row, which apply to all samples.

        Returns:
            {output: [B, …]}, each in the dtype of the output.

        Raises:
            InvalidRequest: the input cannot be scored, or the bundle has no scores. The message names the feature or
                input, and what was expected.
            HostUnavailable: as for `lookup`.
        """
        tensors = self._encoded_for_scores(features, dense, shared, nulls)
        return self._scores(self.outputs(tensors), tensors)

    def stream(
        self,
        batches: Iterable[Any],
        *,
        method: Method = "score",
        nulls: Nulls = "refuse",
        errors: Errors = "raise",
        progress: SamplesDone = lambda _: None,
    ) -> Iterator[Any]:
        """Answer batches of any size, in order.

            for scores in engine.stream(parquet_file.iter_batches()):
                writer.write_table(scores.to_arrow())

        A batch is answered in chunks of thousands of samples, unless scores depend on the other samples of a request.
        The next batch is read after the caller has taken the answer to the last one.

        Args:
            batches: inputs of `score` or `lookup`: DataFrames, or ids by feature; for scores also tuples
                (features, dense). No feature is shared.
            method: "score" or "lookup".
            nulls: as for `lookup`.
            errors: "raise" the error of a batch in place of its answer, which ends the stream, or "yield" it and
                continue.
            progress: called after each batch with the number of answered samples.

        Yields:
            For each batch, the result of the method, or its ServingError.

        Raises:
            InvalidRequest, HostUnavailable: as for `score`. The message begins with the number of the batch, from 0.
        """
        check_stream(batches, method, errors)
        return answer_batches(batches, partial(self._answer_batch, method, nulls), errors, progress)

    def outputs(self, tensors: Tensors) -> Outputs:
        """Answer a request: its outputs by name, as sent but without the leading dimension of 1.

        Raises:
            InvalidRequest, HostUnavailable: as for `lookup`.
        """
        (outputs,) = self._answered(tensors).outputs()
        return outputs

    def answer(self, requests: Sequence[KjtRequest]) -> GroupAnswer:
        """Answer requests together, with as few TBE calls as possible. An invalid request does not affect the others.

        Args:
            requests: requests that `serving.requests.accept.accept` accepted by the engine's schema.
        """
        return answer(self.schema, requests, self.ranks.answer, self._dense)

    def _encoded(self, features: Features, shared: Collection[str], nulls: Nulls) -> Tensors:
        keys = self.schema.all_features.keys
        return encode(features, self._weighted_keys, shared, keys=keys, nulls=nulls)

    def _encoded_for_scores(
        self, features: Features, dense: DenseFeatures, shared: Collection[str], nulls: Nulls
    ) -> Tensors:
        schema = self.schema
        if not isinstance(schema, ScoringSchema):
            raise InvalidRequest(f"{self.bundle.path}: has no scores: export the model with --scores")
        tensors = self._encoded(features, shared, nulls)
        lengths = lengths_by_key(tensors, tensors.features or schema.all_features.keys) if schema.by_id else {}
        names = [output.name for output in schema.dense_part.outputs]
        encoded = encode_dense(schema.dense_inputs, dense, lengths, frame=features, nulls=nulls)
        return replace(tensors, outputs=names, dense=encoded)

    def _answer_batch(self, method: Method, nulls: Nulls, batch: Any) -> tuple[AnswerColumns[Any], int]:
        """The answer to a batch of a stream, and the number of its samples."""
        features, dense = features_and_dense(batch, method)
        schema, all_features = self.schema, self.schema.all_features
        limits = engine_chunk_limits(all_features.dims.tolist(), has_sequences=bool(all_features.sequence.any()))
        if method == "lookup":
            tensors = self._encoded(features, (), nulls)
            chunks = cut(tensors, limits, schema.by_id)
            answer, samples = answer_chunks(chunks, lambda chunk: self._answered(chunk).by_feature(chunk))
            return AnswerColumns(answer), samples
        tensors = self._encoded_for_scores(features, dense, (), nulls)
        is_whole = isinstance(schema, ScoringSchema) and schema.dense_part.mixes_samples
        chunks = iter([tensors]) if is_whole else cut(tensors, limits, schema.by_id)
        answer, samples = answer_chunks(chunks, self.outputs)
        return self._scores(answer, tensors), samples

    def _scores(self, scores: Mapping[str, Any], tensors: Tensors) -> AnswerColumns[Any]:
        """The scores of a request, with the lengths of outputs that have a row for each id."""
        schema: Any = self.schema  # it has scores
        key_of = {output.name: output.key for output in schema.dense_part.outputs if output.key is not None}
        keys = tensors.features or schema.all_features.keys
        return AnswerColumns(scores, lengths_by_id(key_of, tensors, keys, schema.by_id))

    def _answered(self, tensors: Tensors) -> GroupAnswer:
        """The answer to one request; raises InvalidRequest and HostUnavailable."""
        answer = self.answer([accept(self.schema, tensors)])
        if answer.errors:
            raise answer.errors.pop(0)  # nothing else may hold the error, which holds this frame
        return answer


def _hosts_of(bundle: Bundle, hosts: HostsConfig | None) -> HostsConfig | None:
    """The hosts of a bundle, or None if it has all ranks itself.

    Raises:
        ConfigurationError: `hosts` is set for a bundle without hosts.
    """
    if not bundle.manifest.hosts:
        if hosts is not None and hosts.addresses:
            raise ConfigurationError(
                f"{bundle.path}: expected no hosts: all its ranks are in the bundle: leave them out (`tbe-serve "
                "configure --no-hosts`)"
            )
        return None
    return hosts or HostsConfig(addresses={})
