"""The model.py of a model that does nothing but return a tensor made beforehand: Triton's own cost."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Reads no input."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make the answer: zeros of the config's parameter `shape`, as the output that `output` names."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._output = parameters["output"]["string_value"]
        self._answer = np.zeros(list(map(int, parameters["shape"]["string_value"].split(","))), np.float32)

    def execute(self, requests: list[Any]) -> list[Any]:
        """The same answer to everyone."""
        return [pb_utils.InferenceResponse([pb_utils.Tensor(self._output, self._answer)]) for _ in requests]
