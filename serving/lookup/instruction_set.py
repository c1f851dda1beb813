"""The vector instructions of the processor that FBGEMM's CPU kernels use, as FBGEMM reports them.

Without vector instructions FBGEMM looks rows up with its reference kernels, which take 10 to 30 times as long. FBGEMM
does not warn of this (`serving.torch_libraries` has the cause and the cure).
"""

import ctypes
import importlib.util
import warnings
from functools import cache
from pathlib import Path

# FBGEMM's enum inst_set_t, in its order (https://github.com/pytorch/FBGEMM, include/fbgemm/Utils.h).
_INSTRUCTION_SETS = ("anyarch", "avx2", "avx512", "avx512_ymm", "avx512_vnni", "avx512_vnni_ymm", "sve")
# The C++ function fbgemm::fbgemmInstructionSet().
_SYMBOL = "_ZN6fbgemm20fbgemmInstructionSetEv"
# Flags in /proc/cpuinfo of vector instructions that FBGEMM has kernels for.
_VECTOR_FLAGS = ("avx2", "sve")


class SlowKernelWarning(RuntimeWarning):
    """FBGEMM looks rows up without the vector instructions that the processor has."""


@cache
def instruction_set() -> str:
    """The instruction set that FBGEMM chose its kernels for: a name of `inst_set_t`, such as "avx2".

    Load FBGEMM's libraries before (`serving.lookup.program.load_fbgemm`). The first call takes half a millisecond to
    find the library.

    Returns:
        The name; "anyarch" for the reference kernels; the number of an `inst_set_t` without a known name; or
        "unknown" if this release of FBGEMM does not report it.
    """
    package = importlib.util.find_spec("fbgemm_gpu")
    if package is None or package.origin is None:
        return "unknown"
    try:
        detect = getattr(ctypes.CDLL(str(Path(package.origin).with_name("fbgemm.so"))), _SYMBOL)
    except (OSError, AttributeError):
        return "unknown"
    number: int = detect()
    return _INSTRUCTION_SETS[number] if 0 <= number < len(_INSTRUCTION_SETS) else str(number)


def slow_kernels(chosen: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """A warning that FBGEMM uses its reference kernels on a processor with vector instructions, with advice.

    Args:
        chosen: the result of `instruction_set`.
        cpuinfo: Linux's description of the processor.

    Returns:
        One line, or None if the kernels are as fast as the processor allows.
    """
    if chosen != "anyarch":
        return None
    vector = next((flag for flag in _VECTOR_FLAGS if flag in processor_flags(cpuinfo)), None)
    if vector is None:
        return None
    return (
        f"FBGEMM: expected kernels for this processor's {vector}, got its reference kernels: lookups take 10 to 30 "
        "times as long: put `import serving` before `import torchrec` and `import fbgemm_gpu`"
    )


def warn_of_slow_kernels() -> None:
    """Warn if FBGEMM uses its reference kernels on a processor with vector instructions.

    Warns:
        SlowKernelWarning: once in a process, with the line to add to the program.
    """
    advice = slow_kernels(instruction_set())
    if advice is not None:
        warnings.warn(advice, SlowKernelWarning, stacklevel=2)


def processor_flags(cpuinfo: Path) -> set[str]:
    """The flags in Linux's description of the processor: `flags` on x86, `Features` on ARM."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return {
        flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()
    }
