"""The model.py of a model that does nothing but return a tensor made beforehand: Triton's own cost."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.backend.dlpack import to_tensor


class TritonPythonModel:
    """Reads no input."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make the answer: zeros of the config's parameter `shape`, [1, …], as the output that `output` names."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._output = parameters["output"]["string_value"]
        shape = [*map(int, parameters["shape"]["string_value"].split(","))]
        self._answer = np.zeros(shape[1:], np.float32)

    def execute(self, requests: list[Any]) -> list[Any]:
        """The same answer to everyone."""
        return [
            pb_utils.InferenceResponse([to_tensor(pb_utils.Tensor.from_dlpack, self._output, self._answer)])
            for _ in requests
        ]
