"""A loaded bundle that answers lookups in this process, no server needed."""

import io
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from serving.bundle.digests import read_checked
from serving.bundle.manifest import MANIFEST, PROGRAM
from serving.bundle.opening import Bundle, open_bundle
from serving.bundle.plan import Plan
from serving.bundle.use import hold
from serving.errors import BundleError, InvalidRequest
from serving.pins import load_fbgemm
from serving.request import kjt
from serving.request.encoding import Features, decode, encode
from serving.request.schema import Schema
from serving.request.tensors import Batch, Embeddings, Tensors


class Engine:
    """The program of an opened bundle over its memory-mapped weights.

    Engines on one bundle, in any number of processes, share one copy of the weights, in the page cache. Several
    threads must not use one engine at once.

    Attributes:
        bundle: the bundle.
        schema: the features that requests are checked against.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        # Weights may be links into another bundle. `tbe-export prune` has to leave that one alone, too.
        linked = {(bundle.path / name).resolve().parent for name in bundle.manifest.weights_files}
        for folder in {bundle.path, *(each for each in linked if (each / MANIFEST).exists())}:
            weakref.finalize(self, os.close, hold(folder))
        self.schema = Schema.of(bundle.manifest)
        self._weighted = bundle.manifest.weighted_keys
        program = load_program(bundle)
        program.weights_host = map_weights(bundle.path, bundle.manifest.plan)
        # Freezing folds constants in. `forward` avoids the hooks of nn.Module.__call__: a third of a small lookup.
        with torchscript():
            self._lookup = torch.jit.freeze(program.eval()).forward

    @classmethod
    def open(cls, path: Path | str) -> "Engine":
        """Load the bundle at `path`. The time does not depend on the size of its tables.

        Rows are read from disk when they are looked up, and are not compared with their digests:
        `serving.bundle.verify_digests` does that. `tbe-export prune` leaves the bundle alone while the engine lives.

        Raises:
            BundleError: the bundle cannot be opened (see `serving.bundle.opening.open_bundle`) or mapped.
            EnvironmentMismatch: torch and FBGEMM do not work together.
        """
        return cls(open_bundle(Path(path)))

    def lookup(self, features: Features) -> dict[str, Embeddings]:
        """Look up the pooled embeddings of some features.

        Args:
            features: ids by feature (TorchRec's KJT key), in any form that `serving.request.encoding.encode` takes.

        Returns:
            {feature: [B, dim]}, in the order of `features` and the bundle's output dtype, float32 or float16. Where
            several tables read a key, their answers are called `key@table`, as TorchRec calls them.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
        """
        tensors = encode(features, self._weighted)
        selection = self.schema.select(tensors.features)
        return decode(self.answer(tensors), dict(zip(selection.names, selection.dims.tolist(), strict=True)))

    def answer(self, tensors: Tensors) -> Embeddings:
        """Answer one request.

        Returns:
            Its features side by side: [B, D] in the bundle's output dtype, float32 or float16.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
        """
        request = kjt.accept(self.schema, tensors)
        try:
            checked = kjt.check([request])
        except InvalidRequest:
            request, _ = kjt.apply_id_policies(request)
            checked = kjt.check([request])
        return self.run(kjt.merge(self.schema, checked))

    def run(self, batch: Batch) -> Embeddings:
        """Make one TBE call.

        Returns:
            The features of `batch` side by side: [B, D] in the bundle's output dtype, float32 or float16.
        """
        # The default order is compiled in; any other is an argument.
        features = None if batch.selection.default else torch.from_numpy(batch.selection.positions)
        weights = None if batch.weights is None else torch.from_numpy(batch.weights)
        values, offsets = torch.from_numpy(batch.values), torch.from_numpy(batch.offsets)
        embeddings = self._lookup(values, offsets, weights, features)
        array: Embeddings = embeddings.numpy()
        return array


@contextmanager
def torchscript() -> Iterator[None]:
    """Silence the warning that TorchScript is deprecated. torch.export cannot call FBGEMM in a server yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
        yield


def load_program(bundle: Bundle) -> torch.jit.ScriptModule:
    """Load the program of `bundle`, without weights.

    Raises:
        EnvironmentMismatch: torch and FBGEMM do not work together.
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """
    load_fbgemm()
    path = bundle.path / PROGRAM
    # TorchScript is code. Load the bytes that were compared with their digest: the file may change meanwhile.
    code = io.BytesIO(read_checked(path, bundle.manifest.files[PROGRAM]))
    try:
        with torchscript():
            program: torch.jit.ScriptModule = torch.jit.load(code, map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BundleError(f"{path}: torch {torch.__version__} cannot load it: {error}") from error
    if getattr(program, "layout", None) != bundle.manifest.layout:
        raise BundleError(f"{path}: was compiled for another manifest: publish the bundle again")
    return program


def map_weights(directory: Path, plan: Plan) -> list[torch.Tensor]:
    """Map the weights file of each rank.

    Returns:
        For each rank, the bytes of its file: uint8 [size of the file], which nobody may write to. A page is read when
        it is first touched. Of a rank on another host, nothing: uint8 [0].

    Raises:
        BundleError: a file cannot be mapped.
    """
    return [
        torch.empty(0, dtype=torch.uint8) if rank.weights_file is None else _map(directory / rank.weights_file)
        for rank in plan.ranks
    ]


def _map(path: Path) -> torch.Tensor:
    if path.stat().st_size == 0:  # a rank without shards: an empty file cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be mapped: {error.strerror}: it takes address space, and memory only as it is read: "
            "look at `ulimit -v` and the limits of the container"
        ) from error
    with warnings.catch_warnings():
        # torch has no read-only tensors. The program only reads them.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)
