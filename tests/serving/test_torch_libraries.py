"""FBGEMM finds the processor's vector instructions, whatever a program imports first."""

import subprocess
import sys

import pytest

from serving.torch_libraries import share_cpuinfo
from tests.support.long_cases import one_in

CHECK = """
from serving.lookup.program import load_fbgemm
from serving.lookup.instruction_set import instruction_set, slow_kernels
load_fbgemm()
assert slow_kernels(instruction_set()) is None, instruction_set()
"""
# The child imports torchrec too, which loads FBGEMM itself.
IN_A_FORKED_PROCESS = f"""
import os
child = os.fork()
if not child:
    import torchrec
{CHECK}
if child:
    assert not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
# FBGEMM is loaded before this package can do anything.
TOO_LATE = """
import torch, torchrec, warnings
from serving.lookup.program import load_fbgemm
from serving.lookup.instruction_set import SlowKernelWarning, instruction_set, slow_kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for _ in range(3):
        load_fbgemm()
said = [str(warning.message) for warning in caught if warning.category is SlowKernelWarning]
advice = slow_kernels(instruction_set())
assert said == ([] if advice is None else [advice]), (said, advice)
"""


def run(program: str, *options: str) -> None:
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("imports", one_in(2, ["import torch, serving", "import serving, torch"]))
def test_fbgemm_uses_vector_instructions_in_a_forked_process(imports: str) -> None:
    run(imports + IN_A_FORKED_PROCESS)


def test_importing_export_keeps_fast_kernels_and_causes_no_future_warning() -> None:
    """With torch 2.14 that is a FutureWarning, which Python shows to everyone."""
    run("import export.pipeline, serving.engine" + CHECK, "-W", "error::FutureWarning")


def test_a_program_that_loads_fbgemm_first_is_warned_once_of_slow_kernels() -> None:
    run(TOO_LATE)


def test_an_environment_without_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("ctypes.CDLL", lambda *names, **_: loaded.append(names))
    share_cpuinfo()
    assert loaded
    loaded.clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    share_cpuinfo()
    assert loaded == []
