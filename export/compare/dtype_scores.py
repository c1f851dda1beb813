"""What the trained model answers if its tables are stored in other dtypes, for any dtype of each table at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from export.batchability.differences import Numbers
from export.compare.choose_dtypes import Dtypes
from export.compare.labelled_rows import LabelledBatch
from export.errors import ModelError, last_line
from export.parity.answers import by_feature
from export.plan.planner import plan_shards
from export.plan.sharding import Sharding
from export.prepare import Prepared
from export.program.compile import write_program
from export.rows.quantize import packs
from export.rows.rank_files import store_rows
from export.rows.table_error import TableError
from export.scores.probe_inputs import request_inputs, with_embeddings
from serving.bundle.formats import WeightDtype
from serving.bundle.load import weights_paths
from serving.bundle.manifest import write_manifest
from serving.bundle.scores import DensePart, ScoreOutput
from serving.engine import Engine
from serving.errors import ConfigurationError, InvalidRequest
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from serving.requests.id_maps import IdMaps
from serving.requests.layout import lengths_by_key
from serving.requests.schema import schema_of
from serving.requests.types import Array, Tensors


@dataclass(frozen=True, eq=False, slots=True)
class StoredDtype:
    """The tables of a model in one dtype, on the disk.

    Attributes:
        engine: looks them up.
        refusals: why an export refuses the dtype for a table, by table.
    """

    engine: Engine
    refusals: Mapping[str, str]


def store_dtype(folder: Path, prepared: Prepared, dtype: WeightDtype) -> StoredDtype:
    """Store all tables in one dtype, without the dense part. A table that the dtype cannot hold is stored as FP32.

    Args:
        folder: for the files. It must not exist.
        prepared: the model.
        dtype: the dtype.

    Raises:
        CheckpointError, QuantizeError: a table cannot be stored.
    """
    folder.mkdir()
    tables = tuple(
        msgspec.structs.replace(table, dtype=dtype if packs(table.dim, dtype) else WeightDtype.FP32)
        for table in prepared.manifest.tables
    )
    plan = plan_shards(tables, prepared.manifest.features, Sharding())
    manifest = msgspec.structs.replace(prepared.manifest, tables=tables, plan=plan, dense_part=None)
    errors: dict[str, TableError] = {}
    for stored in store_rows(weights_paths(folder, manifest), prepared.trained.tables, manifest, prepared.weights):
        errors[stored.table] = stored.error
    prepared.maps.write(folder)
    write_manifest(folder, write_program(folder, manifest, None, {}))
    refusals = {}
    for table in tables:
        if table.dtype is not dtype:
            refusals[table.name] = f"its dim {table.dim} is not a multiple of {dtype.format.dim_multiple}"
        elif (refusal := errors[table.name].coarse.refusal()) is not None:
            refusals[table.name] = refusal
    return StoredDtype(Engine.open(folder), refusals)


def choose_output(part: DensePart, name: str | None) -> ScoreOutput:
    """The output whose AUC is measured: the one that is named, or the only one with one number for each sample.

    Raises:
        ConfigurationError: there is no such output, or there are several.
    """
    numbers = [output for output in part.outputs if output.key is None and int(np.prod(output.shape)) == 1]
    chosen = [output for output in numbers if name in (None, output.name)]
    if len(chosen) != 1:
        expected = "one of the outputs" if numbers else "an output"
        raise ConfigurationError(
            f"output: expected {expected} with one number for each sample: the model has "
            + ", ".join(f"{output.name!r} {list(output.shape)}" for output in part.outputs)
            + ("" if name is None else f", got {name!r}")
        )
    return chosen[0]


class DtypeScorer:
    """Scores rows as bundles would that store each table in any of some dtypes.

    Each batch is looked up once in each dtype. A bundle's embeddings are put together from these answers, feature by
    feature, and go through the dense part as it is served.

    Args:
        prepared: the model, with scores.
        stored: all tables in each dtype.
        output: the output to score.
    """

    def __init__(self, prepared: Prepared, stored: Mapping[WeightDtype, StoredDtype], output: ScoreOutput) -> None:
        assert prepared.scored is not None  # noqa: S101
        self._engines = {dtype: stored_dtype.engine for dtype, stored_dtype in stored.items()}
        self._manifest = prepared.manifest
        self._part = prepared.scored.part
        self._forward = prepared.scored.formats.forward
        self._eager_scores = prepared.scored.eager_scores
        self._output = output.name
        self._position = self._part.outputs.index(output)
        bundle = next(iter(self._engines.values())).bundle
        self._schema = schema_of(prepared.manifest, IdMaps.of(bundle.path, bundle.manifest))

    def score(self, batch: LabelledBatch, bundles: Sequence[Dtypes]) -> tuple[list[Numbers], Numbers | None]:
        """Score the rows of a batch.

        Returns:
            The scores by each bundle, [B] each, and by the trained model itself; None if it cannot be run.

        Raises:
            ConfigurationError: the rows are no request for scores, or have another number of labels.
            ModelError: a score is not a number.
        """
        try:
            ids, dense, looked_up = self._look_up(batch)
        except InvalidRequest as error:
            raise self._refusal(batch, error) from error
        inputs = request_inputs(self._manifest, self._part.inputs, ids, dense)
        scores = []
        for dtypes in bundles:
            answer = {
                feature.name: looked_up[dtypes[feature.table]][feature.name] for feature in self._manifest.features
            }
            tensors = with_embeddings(inputs, answer).tensors(self._part.jagged)
            with torch.inference_mode():
                scores.append(_checked(batch, self._forward(*tensors)[self._position].numpy()))
        if self._eager_scores is None:
            return scores, None
        try:
            by_model = self._eager_scores(inputs)[self._output]
        except Exception as error:  # the model's code may raise anything, for ids outside of a table for example
            raise ConfigurationError(
                f"{batch.where}: the trained model cannot answer: {last_line(error)}: give ids of its tables; or, "
                "with a checkpoint, trained_memory = 0 in the --config file, to compare with a bundle of FP32 rows"
            ) from error
        return scores, _checked(batch, by_model)

    def _look_up(self, batch: LabelledBatch) -> tuple[Tensors, Mapping[str, Array], dict[WeightDtype, Any]]:
        """A batch as a request, and the answer to it in each dtype, by feature."""
        ids, dense = self._request(batch)
        looked_up = {
            dtype: by_feature(self._manifest, ids, engine.outputs(ids)) for dtype, engine in self._engines.items()
        }
        return ids, dense, looked_up

    def _refusal(self, batch: LabelledBatch, error: InvalidRequest) -> ConfigurationError:
        """The error that names the first refused row of a batch, or the rows that are only refused together."""
        for half in batch.halves() if batch.halves is not None else ():
            try:
                self._look_up(half)
            except InvalidRequest as error_of_half:
                return self._refusal(half, error_of_half)
        return ConfigurationError(f"{batch.where}: {error}")

    def _request(self, batch: LabelledBatch) -> tuple[Tensors, Mapping[str, Array]]:
        """A batch as a request for all keys, in the manifest's order, and its dense inputs, checked as in serving."""
        features, keys = batch.features, self._manifest.keys
        if isinstance(features, Mapping):
            features = {key: features[key] for key in keys if key in features} | {**features}
        ids = encode(features, self._manifest.weighted_keys, nulls=batch.nulls)
        lengths = lengths_by_key(ids, ids.features or ())
        dense = encode_dense(self._part.inputs, batch.dense, lengths, nulls=batch.nulls)
        samples = accept(self._schema, replace(ids, dense=dense, outputs=[self._output])).samples
        if samples != batch.labels.size:
            raise ConfigurationError(
                f"{batch.where}: label: expected 0 or 1 for each of {samples} samples, got {batch.labels.size} labels"
            )
        return replace(ids, features=None), dense


def _checked(batch: LabelledBatch, scores: Numbers) -> Numbers:
    """Scores as [B], if they are numbers."""
    scores = scores.reshape(-1)
    if np.isnan(scores).any():
        raise ModelError(f"{batch.where}: the score of sample {int(np.isnan(scores).argmax())} is not a number")
    return scores
