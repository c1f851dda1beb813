"""A loaded bundle that answers lookups in this process, no server needed."""

import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from serving import kjt
from serving.bundle import PROGRAM, Bundle, open_bundle
from serving.encoding import Features, decode, encode
from serving.errors import BundleError
from serving.kjt import Embeddings, KjtRequest, Schema
from serving.pins import load_fbgemm
from serving.plan import Plan

load_fbgemm()


class Engine:
    """The program of a bundle over its memory-mapped weights.

    Engines on one bundle, in any number of processes, share one copy of the weights: the page cache's. Not
    for use by several threads at once.

    Attributes:
        bundle: what was loaded.
        schema: what requests are checked against.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.schema = Schema.of(bundle.manifest)
        self._features = self.schema.select(None)
        self._dims = dict(zip(self.schema.names, self.schema.dims.tolist(), strict=True))
        names = zip(self.schema.names, self.schema.feature_weighted, strict=True)
        self._weighted = tuple(name for name, counts in names if counts)
        program = load_program(bundle)
        program.weights_host = map_weights(bundle.path, bundle.manifest.plan)
        # Constants folded in, and past the hooks of nn.Module.__call__, which cost a third of a small lookup.
        self._lookup = torch.jit.freeze(program.eval()).forward

    @classmethod
    def open(cls, path: Path | str) -> "Engine":
        """Load the bundle at `path`, in a time that does not depend on the size of its tables.

        Raises:
            BundleError: as `serving.bundle.open_bundle`.
        """
        return cls(open_bundle(Path(path)))

    def lookup(self, features: Features) -> dict[str, Embeddings]:
        """Pooled embeddings {feature: [B, dim]} of the features given, in the order given.

        Args:
            features: ids by feature, in any form that `serving.encoding.encode` takes.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
        """
        tensors = encode(features, self._weighted)
        request = kjt.check(self.schema, tensors.values, tensors.lengths, tensors.weights, tensors.features)
        return decode(self.answer(request), tensors.features, self._dims)

    def answer(self, request: KjtRequest) -> Embeddings:
        """One TBE call: [B, D], the features of `request` side by side, in the bundle's output dtype."""
        # The default order is compiled in; any other is an argument.
        features = None if request.features == self._features else torch.tensor(request.features)
        weights = None if request.weights is None else torch.from_numpy(request.weights)
        values, offsets = torch.from_numpy(request.values), torch.from_numpy(request.offsets)
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
        BundleError: torch cannot load it, or it was compiled for another manifest.
    """
    path = bundle.path / PROGRAM
    try:
        with torchscript():
            program: torch.jit.ScriptModule = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BundleError(f"{path}: torch {torch.__version__} cannot load it: {error}") from error
    if program.layout != bundle.manifest.layout:
        raise BundleError(f"{path}: was compiled for another manifest: publish the bundle again")
    return program


def map_weights(directory: Path, plan: Plan) -> list[torch.Tensor]:
    """The bytes of each rank as uint8, read from the page cache when they are touched, never written."""
    return [_map(directory / rank.weights) for rank in plan.ranks]


def _map(path: Path) -> torch.Tensor:
    if path.stat().st_size == 0:  # a rank without shards; nothing cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        # torch has no read-only tensors; the program only reads.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)
