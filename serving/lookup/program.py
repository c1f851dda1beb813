"""Loads the TorchScript of a bundle: the lookup program, and the dense part of a bundle with scores."""

import importlib.util
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from serving.bundle.manifest import PROGRAM
from serving.bundle.opening import Bundle, read_checked
from serving.bundle.scores import SCORES, DensePart
from serving.errors import BundleError, EnvironmentMismatch
from serving.pins import INSTALL, check_pins
from serving.request.bags import joined
from serving.request.tensors import Batch, Dense, Embeddings, KjtRequest, Outputs

# TBE's lookups, and the operators that split and join jagged tensors. They load the libraries that they need.
_LIBRARIES = ("fbgemm_gpu_tbe_inference.so", "fbgemm_gpu_py.so")


def load_fbgemm() -> None:
    """Check the pins, then load FBGEMM's libraries.

    The package itself is not imported. Its __init__ also loads the libraries for training and the meta operators for
    compilers. That is 500 modules, sympy among them: 35 MB and half a second in each process.

    Raises:
        EnvironmentMismatch: an installed version differs from its pin (`serving.pins`), or a library is missing.
    """
    check_pins()
    spec = importlib.util.find_spec("fbgemm_gpu")
    assert spec is not None  # noqa: S101  it is installed: its pin was checked
    assert spec.origin is not None  # noqa: S101
    for name in _LIBRARIES:
        path = Path(spec.origin).with_name(name)
        if not path.exists():
            raise EnvironmentMismatch(f"{path}: expected a library of FBGEMM, found none: {INSTALL}")
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]


@contextmanager
def torchscript() -> Iterator[None]:
    """Silence the warning that TorchScript is deprecated. torch.export cannot call FBGEMM in a server yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
        yield


def load_program(bundle: Bundle) -> torch.jit.ScriptModule:
    """Load the lookup program of `bundle`, without weights files.

    Raises:
        EnvironmentMismatch: torch and FBGEMM do not work together.
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """
    load_fbgemm()
    program = load_torchscript(bundle, PROGRAM)
    if getattr(program, "layout", None) != bundle.manifest.layout:
        raise BundleError(f"{bundle.path / PROGRAM}: was compiled for another manifest: publish the bundle again")
    return program


def load_torchscript(bundle: Bundle, name: str) -> torch.jit.ScriptModule:
    """Load the file `name` of `bundle`, which is TorchScript.

    Raises:
        BundleError: the file changed after the export, or torch cannot load it.
    """
    path = bundle.path / name
    # TorchScript is code. Load the very bytes that were compared with their digest: the file may change after that.
    code = io.BytesIO(read_checked(path, bundle.manifest.files[name]))
    try:
        with torchscript():
            return torch.jit.load(code, map_location="cpu")  # type: ignore[no-any-return, no-untyped-call]
    except RuntimeError as error:
        raise BundleError(f"{path}: torch {torch.__version__} cannot load it: {error}") from error


# Batch sizes of the calls that are made while loading. TorchScript observes two calls, compiles at the next one, and
# again at the first with another batch size. These calls take ten times as long as later ones.
_FIRST_CALLS = (1, 1, 1, 2, 2)


class DenseProgram:
    """The second program of a bundle, `scores.pt`.

    Attributes:
        part: its description in the manifest.

    Raises:
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """

    def __init__(self, bundle: Bundle, part: DensePart) -> None:
        self.part = part
        path = bundle.path / SCORES
        self._forward = load_torchscript(bundle, SCORES).forward
        width = sum(table.dim for table in bundle.manifest.feature_tables)
        for samples in _FIRST_CALLS:
            dense = [np.zeros((samples, *each.shape), each.dtype.numpy) for each in part.inputs]
            try:
                found = self._run(np.zeros((samples, width), np.float32), dense)
                shapes = [numbers.shape for numbers in found.values()]
            except (RuntimeError, ValueError) as error:
                why = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
                raise BundleError(f"{path}: cannot score: {why}: export it again") from error
            if shapes != [(samples, *each.shape) for each in part.outputs]:
                raise BundleError(f"{path}: answers {shapes}: was compiled for another manifest: export it again")

    def score_batch(self, batch: Batch, embeddings: Embeddings) -> dict[int, Outputs]:
        """Score the requests of a batch that ask for scores.

        Args:
            batch: the requests.
            embeddings: the ranks' answer to the batch, float32 or float16 [B, D]. Before scoring, the row of a
                feature that a request sends once is repeated for each of its samples.

        Returns:
            By the position of the request in the batch: the outputs that it asks for by name, float32 [B_r, …].
        """
        asking = [number for number, request in enumerate(batch.requests) if request.dense is not None]
        if not asking:
            return {}
        requests = [batch.requests[number] for number in asking]
        if len(asking) < len(batch.requests) or any(request.once is not None for request in requests):
            first = np.cumsum([0, *(request.height for request in batch.requests)])
            parts = [embeddings[first[number] : first[number + 1]] for number in asking]
            embeddings = joined([spread(part, each) for part, each in zip(parts, requests, strict=True)])
        dense = [request.dense for request in requests if request.dense is not None]
        scores = self.score(embeddings, dense, [each.samples for each in requests])
        return {
            number: {name: numbers for name, numbers in found.items() if name in request.outputs}
            for number, request, found in zip(asking, requests, scores, strict=True)
        }

    def score(self, embeddings: Embeddings, dense: Sequence[Dense], samples: Sequence[int]) -> list[Outputs]:
        """Score R requests: by one call, or by one for each if the dense part mixes samples.

        Args:
            embeddings: of all requests, one after another, with all features in the manifest's order; float32 or
                float16 [B, D].
            dense: the dense inputs of each request [R].
            samples: B_r of each request [R]. Their sum is B.

        Returns:
            The outputs of each request by name, float32 [B_r, *shape].
        """
        ends = np.cumsum(samples).tolist()
        rows = [slice(end - count, end) for end, count in zip(ends, samples, strict=True)]
        if self.part.mixes_samples:
            return [self._run(embeddings[each], inputs) for each, inputs in zip(rows, dense, strict=True)]
        found = self._run(embeddings, [joined(each) for each in zip(*dense, strict=True)])
        return [{name: numbers[each] for name, numbers in found.items()} for each in rows]

    def _run(self, embeddings: Embeddings, dense: Dense) -> Outputs:
        if not len(embeddings):
            return {each.name: np.empty((0, *each.shape), np.float32) for each in self.part.outputs}
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors
            found = self._forward(*map(torch.from_numpy, (embeddings, *dense)))
        return {each.name: numbers.numpy() for each, numbers in zip(self.part.outputs, found, strict=True)}


def spread(embeddings: Embeddings, request: KjtRequest) -> Embeddings:
    """What a request's scores are made of: the row of what comes once, in each sample.

    Args:
        embeddings: its part of the answer to a batch, [height, D]; written to.
        request: the request.

    Returns:
        [B, D].
    """
    if request.once is not None:
        ends = request.selection.ends
        for feature in np.flatnonzero(request.once).tolist():
            columns = slice(ends[feature] - request.selection.dims[feature], ends[feature])
            embeddings[1:, columns] = embeddings[0, columns]
    return embeddings[: request.samples]
