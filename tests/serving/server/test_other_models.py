"""A repository that has more than models of tbe-export: other models, and what no model is."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from serving.client import LookupClient
from serving.errors import ConfigurationError
from serving.model.config_file import find_models, other_models
from serving.server import run_server
from serving.server.startup import left_out
from serving.triton.command_line import is_plain, loaded_by
from tests.support.servers import FREE

ECHO = """
import triton_python_backend_utils as pb_utils
from torch import from_dlpack


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", from_dlpack(tensor))])
            for request in requests
            for tensor in request.inputs()
        ]
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: [1] }
output { name: "y" data_type: TYPE_INT32 dims: [1] }
"""


def add_model(repository: Path, name: str, files: dict[str, str]) -> None:
    for path, content in files.items():
        file = repository / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


@pytest.fixture
def crowded(one_model: Path, tmp_path: Path) -> Path:
    """A repository with the model `m`, others, and names and links that lead nowhere."""
    repository = tmp_path / "crowded"
    shutil.copytree(one_model, repository)
    add_model(repository, "echo", {"config.pbtxt": CONFIG, "1/model.py": ECHO})
    add_model(repository, "ensemble", {"config.pbtxt": 'platform: "ensemble"'})
    add_model(repository, "onnx one", {"1/model.onnx": ""})
    add_model(repository, ".hidden", {"config.pbtxt": ""})
    add_model(repository, "notes", {"text.md": ""})
    (repository / "dangling").symlink_to("nowhere")
    os.mkdir(bytes(repository) + b"/folder\xff")
    (repository / "file\udcff").touch()
    return repository


def test_other_models_are_distinguished_from_other_folders(crowded: Path) -> None:
    assert find_models(crowded) == ("m",)
    assert other_models(crowded) == ("echo", "ensemble", "onnx one")


def test_models_left_out_are_named_with_how_to_serve_them(crowded: Path) -> None:
    what = "not served, because tbe-export did not make them: "
    assert [*left_out(crowded, False, [])] == [
        f"{what}echo, ensemble, onnx one; to serve them too: tbe-serve run {crowded} -- --load-model=echo "
        "--load-model=ensemble '--load-model=onnx one'"
    ]
    assert [*left_out(crowded, False, ["--load-model=onnx one", "--load-model", "ensemble"])] == [
        f"{what}echo; to serve them too: tbe-serve run {crowded} -- --load-model=echo"
    ]
    assert [*left_out(crowded, False, ["--load-model=*"])] == []
    (signed,) = left_out(crowded, True, [])
    assert signed.endswith("with --trusted-keys only signed bundles are served: serve them by another tritonserver")


def test_names_that_triton_cannot_serve_are_named(crowded: Path) -> None:
    """Its Python backend splits the names of models at blanks, and dies of it."""
    add_model(crowded, "model\udcff", {"config.pbtxt": ""})
    add_model(crowded, "echo two", {"config.pbtxt": CONFIG, "1/model.py": ECHO})
    (line,) = left_out(crowded, False, ["--load-model=echo", "--load-model=ensemble", "--load-model=onnx one"])
    assert "-- " not in line
    assert line.endswith("no blanks or shell characters in names of Python models: rename echo two, model\udcff")


@pytest.mark.parametrize("name", ["a b", "a\tb", "a'b", "a$b", "a;b", "a(b)", "a&b", "a*", "a\\b"])
def test_a_repository_in_which_triton_cannot_start_models_is_refused(
    name: str, one_model: Path, tmp_path: Path
) -> None:
    """A shell splits its path. The model's process ended, and the server waited for it."""
    repository = tmp_path / name
    repository.symlink_to(one_model)
    with (
        pytest.raises(ConfigurationError, match="without blanks and characters that a shell reads"),
        run_server(repository, FREE, log=tmp_path / "log"),
    ):
        pass


def test_a_path_without_shell_characters_is_accepted() -> None:
    assert is_plain("/tmp/é→漢/a-b_c.d+e@f=g,h:i%j#k~l")


def test_models_loaded_by_options_are_found() -> None:
    assert loaded_by(["--log-info=true", "--load-model=a", "--load-model", "b c", "--load-model"]) == {"a", "b c"}


def test_a_crowded_repository_is_served(crowded: Path, tmp_path: Path) -> None:
    with run_server(crowded, FREE, log=tmp_path / "log", options=["--load-model=echo"]) as server:
        (warning,) = [warning for warning in server.warnings if "tbe-export" in warning]
        assert "did not make them: ensemble, onnx one; to serve" in warning
        assert {model.name for model in server.models} >= {"m"}
        with (
            LookupClient(server.grpc, "m", 60) as client,
            tritonclient.grpc.InferenceServerClient(server.grpc) as other,
        ):
            assert len(client.lookup({"x": [[1]]})["x"]) == 1
            input_ = tritonclient.grpc.InferInput("x", [1], "INT32")
            input_.set_data_from_numpy(np.array([5], np.int32))
            np.testing.assert_array_equal(other.infer("echo", [input_], client_timeout=60).as_numpy("y"), [5])
        control = server.control(60)
        assert ("m", 1, "READY") in {(model.model, model.version, model.state) for model in control.index()}
        assert control.load("m") == (1,)
        (crowded / "dangling").unlink()
        os.mkdir(bytes(crowded) + b"/later\xff")
        assert control.ready("m") == (1,)
