"""The dense part as native code, which AOTInductor compiled for one release of torch and some processors.

Its file is a zip archive with `model.so`, a shared library with the code and the weights. If the dense part calls
operators that are not part of torch, the archive also has `model.json`, which lists them. Loading takes milliseconds.
"""

import io
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from serving.bundle.scores import DenseFile, DenseFormat
from serving.lookup.instruction_set import processor_flags

# The flags in /proc/cpuinfo of the processors that have each set of instructions (x86-64 psABI, microarchitecture
# levels).
INSTRUCTIONS = {
    "x86-64-v3": frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}),
}
LIBRARY, OPERATORS = "model.so", "model.json"


def misfit(file: DenseFile, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Why the code in a file of a dense part does not fit this process.

    Args:
        file: a file in any format.
        cpuinfo: Linux's description of the processor.

    Returns:
        What the file needs and what this process has, or None if the file may be loaded.
    """
    if file.format is not DenseFormat.AOTINDUCTOR:
        return None
    if file.torch != str(torch.__version__):  # torch treats versions such as 2.13 and 2.13.0 as equal
        return f"compiled for torch {file.torch}, this is torch {torch.__version__}"
    needed = INSTRUCTIONS.get(file.instructions or "")
    if needed is None:
        return f"compiled for {file.instructions}, expected one of {', '.join(INSTRUCTIONS)}"
    if missing := needed - processor_flags(cpuinfo):
        return f"compiled for {file.instructions}, this processor has no {', '.join(sorted(missing))}"
    return None


def load_aot_inductor(content: bytes) -> Callable[..., Sequence[Tensor]]:
    """The forward of a dense part in native code, which `misfit` must have accepted.

    The library is loaded from a private temporary folder, which is removed afterwards.

    Args:
        content: the content of its file.

    Returns:
        A function of the dense part's inputs. It checks neither their number nor their shapes and dtypes.

    Raises:
        Exception: torch or the linker cannot load it. torch does not document the type.
    """
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name in (LIBRARY, OPERATORS)])
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(Path(folder) / LIBRARY), 1)

    def forward(*inputs: Tensor) -> Sequence[Tensor]:
        return runner.run([*inputs])

    return forward
