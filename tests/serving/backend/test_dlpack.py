"""Tensors through the Python backend of a real tritonserver: each dtype and shape arrives and returns unchanged."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype

from serving.bundle.scores import InputDtype, ScoreDtype
from serving.client import LookupClient
from serving.server import Server, run_server
from tests.serving.server.test_other_models import add_model
from tests.support.models import exported
from tests.support.servers import FREE, replace_model_py

# Those of a bundle's inputs and outputs, and Triton's other dtypes of numbers.
DTYPES = sorted(
    {dtype.numpy for dtype in (*InputDtype, *ScoreDtype)}
    | {np.dtype(dtype) for dtype in (np.float16, np.uint16, np.uint32, np.uint64)},
    key=str,
)
SHAPES = [(1, 1), (1, 8), (5, 1), (5, 8), (3, 0), (0, 3), (0, 0), (1, 0), (0, 1), (4001, 1000)]
# Returns the input, and the one of the request before: memory that ends with its request would have changed.
ECHO = """
import triton_python_backend_utils as pb_utils
from serving.backend.dlpack import to_array, to_tensor

class TritonPythonModel:
    def initialize(self, args):
        self._last = None

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        (tensor,) = (tensor for tensor in request.inputs() if tensor.name() != "offset")
        array = to_array(tensor)[0]
        assert array.flags.aligned and array.flags.writeable
        last, self._last = array if self._last is None else self._last, array
        outputs = {"same_" + tensor.name(): array, "last_" + last.dtype.name: last}
        return pb_utils.InferenceResponse(
            [to_tensor(pb_utils.Tensor.from_dlpack, name, array) for name, array in outputs.items()]
        )
"""
# What users of a server have in their models' processes.
BESIDE = """
import pandas, polars, pyarrow
from serving.backend import TritonPythonModel
assert pandas.Series(pyarrow.array([3, 5])).tolist() == polars.Series([3, 5]).to_list()
"""


def config() -> str:
    tensors: list[tuple[str, str, np.dtype[Any]]] = [("input", "offset", np.dtype(np.uint8))]
    for dtype in DTYPES:
        tensors += [("input", dtype.name, dtype), ("output", f"same_{dtype.name}", dtype)]
        tensors += [("output", f"last_{dtype.name}", dtype)]
    return 'backend: "python"\n' + "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_{np_to_triton_dtype(dtype)} dims: [-1, -1, -1] '
        f"{'optional: true ' if kind == 'input' else ''}}}\n"
        for kind, name, dtype in tensors
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("dlpack")
    bundle = exported(folder)
    repository = bundle.parent.parent
    add_model(repository, "echo", {"config.pbtxt": config(), "1/model.py": ECHO})
    with run_server(repository, FREE, log=folder / "log", options=["--load-model=echo"]) as running:
        yield running


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_arrives_and_returns(server: Server, dtype: np.dtype[np.generic]) -> None:
    random = np.random.default_rng(0)
    last: npt.NDArray[np.generic] | None = None
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        for number, shape in enumerate(SHAPES):
            sent = random.integers(0, 256, (1, *shape), np.uint8).astype(dtype)
            inputs = []
            # What a request holds before a tensor decides where the tensor begins.
            for name, array in (("offset", np.zeros((1, 1, number), np.uint8)), (dtype.name, sent)):
                tensor = tritonclient.grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
                tensor.set_data_from_numpy(array)
                inputs.append(tensor)
            answer = client.infer("echo", inputs, client_timeout=60)
            expected = {"same": sent} if last is None else {"same": sent, "last": last}
            for kind, array in expected.items():
                returned = answer.as_numpy(f"{kind}_{dtype.name}")
                assert (returned.dtype, returned.shape) == (dtype, array.shape)
                np.testing.assert_array_equal(returned, array)
            last = sent


def test_a_model_answers_beside_pandas_polars_and_pyarrow(tmp_path: Path) -> None:
    bundle = exported(tmp_path)
    replace_model_py(bundle, BESIDE)
    with run_server(bundle.parent.parent, FREE) as server, LookupClient(server.grpc, "m", 60) as client:
        ((first, second),) = client.lookup({"x": [[1], [1, 1]]}).values()
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)
    assert first.any()


def test_the_server_warns_of_other_python_models_beside_numpy_2(server: Server) -> None:
    numpy = version("numpy")
    said = [warning for warning in server.warnings if warning.startswith("echo: ")]
    expected = f"and numpy {numpy} is installed: as_numpy() returns wrong numbers, and Tensor(name, array) is empty"
    assert [expected in warning for warning in said] == ([] if numpy.startswith("1.") else [True])
