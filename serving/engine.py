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

from serving import kjt
from serving.bundle import MANIFEST, PROGRAM, Bundle, hold, open_bundle
from serving.digests import read_checked
from serving.encoding import Features, decode, encode
from serving.errors import BundleError, InvalidRequest
from serving.kjt import Batch, Embeddings, Tensors
from serving.pins import load_fbgemm
from serving.plan import Plan
from serving.schema import Schema


class Engine:
    """The program of an opened bundle over its memory-mapped weights.

    Engines on one bundle, in any number of processes, share one copy of the weights: the page cache's. Not
    for use by several threads at once.

    Attributes:
        bundle: what was loaded.
        schema: what requests are checked against.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        # Where weights are links, the bundle to which they lead too.
        linked = {(bundle.path / name).resolve().parent for name in bundle.manifest.weights}
        for folder in {bundle.path, *(each for each in linked if (each / MANIFEST).exists())}:
            weakref.finalize(self, os.close, hold(folder))
        self.schema = Schema.of(bundle.manifest)
        self._weighted = bundle.manifest.weighted_keys
        program = load_program(bundle)
        program.weights_host = map_weights(bundle.path, bundle.manifest.plan)
        # Constants folded in, and past the hooks of nn.Module.__call__, which cost a third of a small lookup.
        with torchscript():
            self._lookup = torch.jit.freeze(program.eval()).forward

    @classmethod
    def open(cls, path: Path | str) -> "Engine":
        """Load the bundle at `path`, in a time that does not depend on the size of its tables.

        Their bytes are not read before they are looked up: `serving.bundle.verify_digests` compares them with their
        digests. `tbe-export prune` leaves the bundle alone while the engine lives.

        Raises:
            BundleError: as `serving.bundle.open_bundle`, or it cannot be mapped.
            EnvironmentMismatch: torch and FBGEMM do not work together.
        """
        return cls(open_bundle(Path(path)))

    def lookup(self, features: Features) -> dict[str, Embeddings]:
        """Pooled embeddings {feature: [B, dim]} of the features given, in the order given.

        The answers of a key that several tables read are called `key@table`, as TorchRec calls them.

        Args:
            features: ids by feature, TorchRec's KJT key, in any form that `serving.encoding.encode` takes.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
        """
        tensors = encode(features, self._weighted)
        selection = self.schema.select(tensors.features)
        return decode(self.answer(tensors), dict(zip(selection.names, selection.dims.tolist(), strict=True)))

    def answer(self, tensors: Tensors) -> Embeddings:
        """The answer to one request: [B, D], its features side by side, in the bundle's output dtype.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
        """
        request = kjt.accept(self.schema, tensors)
        try:
            checked = kjt.check([request])
        except InvalidRequest:
            mended, _ = kjt.mend(request)
            checked = kjt.check([mended])
        return self.run(kjt.merge(self.schema, checked))

    def run(self, batch: Batch) -> Embeddings:
        """One TBE call: [B, D], the features of `batch` side by side, in the bundle's output dtype."""
        # The default order is compiled in; any other is an argument.
        features = None if batch.selection.default else torch.from_numpy(batch.selection.positions)
        weights = None if batch.weights is None else torch.from_numpy(batch.weights)
        values, offsets = torch.from_numpy(batch.values), torch.from_numpy(batch.offsets)
        embeddings = self._lookup(values, offsets, weights, features)
        array: Embeddings = embeddings.numpy()
        return array


@contextmanager
def torchscript() -> Iterator[None]:
    """Without its warnings: deprecated, and what there is until torch.export can call FBGEMM in a server."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
        yield


def load_program(bundle: Bundle) -> torch.jit.ScriptModule:
    """The program of `bundle`, without weights.

    Raises:
        EnvironmentMismatch: torch and FBGEMM do not work together.
        BundleError: it changed after export, torch cannot load it, or it was compiled for another manifest.
    """
    load_fbgemm()
    path = bundle.path / PROGRAM
    # TorchScript is code: what is loaded is what was compared, whatever becomes of the file meanwhile.
    code = io.BytesIO(read_checked(path, bundle.manifest.files[PROGRAM]))
    try:
        with torchscript():
            program: torch.jit.ScriptModule = torch.jit.load(code, map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BundleError(f"{path}: torch {torch.__version__} cannot load it: {error}") from error
    if program.layout != bundle.manifest.layout:
        raise BundleError(f"{path}: was compiled for another manifest: publish the bundle again")
    return program


def map_weights(directory: Path, plan: Plan) -> list[torch.Tensor]:
    """The bytes of each rank as uint8, read from the page cache when they are touched, never written.

    Raises:
        BundleError: a file cannot be mapped.
    """
    return [_map(directory / rank.weights) for rank in plan.ranks]


def _map(path: Path) -> torch.Tensor:
    if path.stat().st_size == 0:  # a rank without shards; nothing cannot be mapped
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
        # torch has no read-only tensors; the program only reads.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)
