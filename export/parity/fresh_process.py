"""A fresh process that answers probes from the files of bundles, as serving does."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from export.errors import ParityError
from serving.bundle.scores import DenseFormat
from serving.requests.types import Array, Outputs, Tensors

ANSWERED = "answered"


class FreshProcess:
    """A process that imports only `serving`, and runs for the duration of a `with` block.

    Start it before the bundle is written: its imports take seconds, during which the export stores rows.
    """

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [sys.executable, "-P", str(Path(__file__).with_name("reload.py"))]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def outputs(self, directory: Path, probe: Tensors) -> Outputs:
        """Answer `probe` from the bundle at `directory`.

        Raises:
            ParityError: the process cannot open the bundle, or refuses the probe. It has ended then.
        """
        arrays: dict[str, Any] = {"values": probe.values, "lengths": probe.lengths}
        if probe.weights is not None:
            arrays["weights"] = probe.weights
        return self._outputs(directory, arrays)

    def scores(self, file: Path, format_: DenseFormat, inputs: Sequence[Array]) -> list[Array]:
        """The outputs of a file with a dense part, in order.

        Args:
            file: the file.
            format_: its format.
            inputs: what the dense part takes, in order.

        Raises:
            ParityError: the process cannot load the file, or run it. It is of no use then.
        """
        arrays = {f"input_{number}": array for number, array in enumerate(inputs)}
        return [*self._outputs(file, arrays, format_.value).values()]

    def _outputs(self, path: Path, arrays: Mapping[str, Any], *details: str) -> Outputs:
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder) / "probe.npz", **arrays)
            if not self._answers([str(path.absolute()), folder, *details]):
                self._process.wait()
                self._errors.seek(0)
                raise ParityError(f"{path}: a fresh process could not answer from it:\n{self._errors.read().strip()}")
            with np.load(Path(folder) / "outputs.npz", allow_pickle=False) as outputs:
                return dict(outputs)

    def _answers(self, task: list[str]) -> bool:
        """Send a task, and wait. Returns whether the process did it; if not, it has ended."""
        assert self._process.stdin is not None  # noqa: S101  it is a pipe
        assert self._process.stdout is not None  # noqa: S101
        with suppress(BrokenPipeError):  # the reason is in its standard error
            print(json.dumps(task), file=self._process.stdin, flush=True)
        # Libraries may print lines of their own.
        return any(line.strip() == ANSWERED for line in self._process.stdout)

    def _stop(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()
