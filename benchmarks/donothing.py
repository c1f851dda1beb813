"""The model.py of a model that does nothing but return a tensor made beforehand: Triton's own cost."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Reads no input."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make the answer: zeros of the config's parameter `shape`."""
        shape = json.loads(args["model_config"])["parameters"]["shape"]["string_value"]
        self._answer = np.zeros([int(size) for size in shape.split(",")], np.float32)

    def execute(self, requests: list[Any]) -> list[Any]:
        """The same answer to everyone."""
        return [pb_utils.InferenceResponse([pb_utils.Tensor("embeddings", self._answer)]) for _ in requests]
