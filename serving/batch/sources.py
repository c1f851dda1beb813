"""Where scores come from: a bundle that is opened in this process, or a server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.batch.columns import ModelInputs
from serving.bundle.load import open_bundle
from serving.client import LookupClient, Tls
from serving.errors import ConfigurationError


@dataclass(frozen=True)
class BundleSource:
    """A bundle on this machine."""

    path: Path

    def identity(self) -> dict[str, str]:
        """What the scores depend on."""
        return {"bundle": open_bundle(self.path).digest}

    def inputs(self) -> ModelInputs:
        """What its model is scored from.

        Raises:
            BundleError: it cannot be opened.
            ConfigurationError: it has no scores, or they depend on the other samples of a request.
        """
        manifest = open_bundle(self.path).manifest
        part = manifest.dense_part
        if part is None:
            raise ConfigurationError(f"{self.path}: expected a model with scores: export it with --scores")
        if part.mixes_samples:
            raise ConfigurationError(
                f"{self.path}: the scores of a sample depend on the other samples of its request: call "
                "`Engine.stream` with the batches that you mean"
            )
        return ModelInputs(
            keys=tuple(dict.fromkeys(feature.key for feature in manifest.features)),
            weighted=manifest.weighted_keys,
            dense=tuple(dense_input.name for dense_input in part.inputs),
            outputs={output.name: output.key for output in part.outputs},
        )

    def open(self) -> Any:
        """An Engine."""
        from serving.engine import Engine  # torch takes seconds

        return Engine.open(self.path)

    def check_answer(self, answer: Any) -> None:
        """Every answer is of this bundle."""


@dataclass(frozen=True)
class ServerSource:
    """A model of a server.

    Attributes:
        address: of the server.
        model: the model's name.
        tls: certificates. None: no TLS.
        timeout_s: deadline of each request, in seconds.
        version: the version that every answer has to be of. None: not yet known.
    """

    address: str
    model: str
    tls: Tls | None
    timeout_s: float
    version: int | None = None

    def identity(self) -> dict[str, str]:
        """What the scores depend on."""
        return {"server": self.address, "model": self.model, "version": str(self.version)}

    def at_its_version(self) -> "ServerSource":
        """This source, with the version that the server answers by.

        Raises:
            ServingError: the server cannot be reached, or the model has no scores.
        """
        with self.open() as client:
            info = client.info()
            no_rows: Any = {key: (np.zeros(0, np.int64), np.zeros(0, np.int32)) for key in info.keys}
            if info.weighted:
                no_rows = {key: (*arrays, np.zeros(0, np.float32)) for key, arrays in no_rows.items()}
            dense = {
                dense_input.name: np.zeros((0, *dense_input.shape), dense_input.dtype.numpy)
                for dense_input in info.dense
            }
            version = client.score(no_rows, dense).version
        return ServerSource(self.address, self.model, self.tls, self.timeout_s, version)

    def inputs(self) -> ModelInputs:
        """What the model is scored from.

        Raises:
            ServingError: the server cannot be reached, or does not have the model.
            ConfigurationError: the model has no scores.
        """
        with self.open() as client:
            info = client.info()
        if not info.scores:
            raise ConfigurationError(f"model {self.model!r}: expected a model with scores: export it with --scores")
        return ModelInputs(
            keys=tuple(info.keys),
            weighted=info.weighted,
            dense=tuple(dense_input.name for dense_input in info.dense),
            outputs={name: info.by_id.get(name) for name in info.scores},
        )

    def open(self) -> LookupClient:
        """A client."""
        return LookupClient(self.address, self.model, self.timeout_s, tls=self.tls)

    def check_answer(self, answer: Any) -> None:
        """Refuse an answer of another version than the run began with.

        Raises:
            ConfigurationError: naming both versions.
        """
        if answer.version != self.version:
            raise ConfigurationError(
                f"model {self.model!r}: expected answers of version {self.version}, which this run began with, got "
                f"version {answer.version}: start again with --restart"
            )


Source = BundleSource | ServerSource
