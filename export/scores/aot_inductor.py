"""Compile a dense part to native code by AOTInductor, for any processor of a microarchitecture level."""

import io
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

import torch
from torch import Tensor

from export.trained.eval_mode import quiet
from serving.bundle.scores import DenseFile, DenseFormat
from serving.errors import ConfigurationError
from serving.lookup.aot_inductor import LIBRARY, OPERATORS, misfit

INSTRUCTIONS = "x86-64-v3"
# Removes debug information, which is most of the library. It is installed with every compiler.
_STRIP = "strip"
# The compiler's default instructions are the exporting machine's, so they are named here. Servers use one thread.
# No precompiled headers: torch would keep them in a folder that is never removed.
_OPTIONS = {
    "cpp.march": INSTRUCTIONS,
    "cpp.simdlen": 256,
    "cpp.threads": 1,
    "compile_threads": 1,
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}


def compiled_file() -> DenseFile:
    """The file of a dense part that this process compiles, for the manifest.

    Raises:
        ConfigurationError: this machine cannot compile it, or not run it: no C++ compiler, or another processor.
    """
    file = DenseFile(
        f"scores.{INSTRUCTIONS}.zip",
        DenseFormat.AOTINDUCTOR,
        instructions=INSTRUCTIONS,
        torch=str(torch.__version__),
    )
    if (reason := misfit(file)) is not None:
        raise ConfigurationError(f"compile (--compile): its code could not be compared with the model here: {reason}")
    for program in (os.environ.get("CXX", "g++"), _STRIP):
        if shutil.which(program) is None:
            raise ConfigurationError(
                f"compile (--compile): expected a C++ compiler, {program!r} is not installed: install g++, or name "
                "another compiler in the environment variable CXX"
            )
    return file


def compile_to_native(exported: bytes, inputs: Sequence[Tensor]) -> bytes:
    """Compile an exported program.

    Args:
        exported: what `torch.export.save` wrote.
        inputs: an example of each input.

    Returns:
        The content of a file in the format AOTINDUCTOR, without sources and debug information.

    Raises:
        Exception: AOTInductor or the compiler fails; torch does not say of which type.
    """
    import torch._inductor  # takes seconds
    from torch._inductor.utils import fresh_cache

    program = torch.export.load(io.BytesIO(exported))
    program.example_inputs = (tuple(inputs), {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with fresh_cache(dir=name), quiet(), redirect_stderr(io.StringIO()):
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / "package.pt2"), inductor_configs=_OPTIONS
            )
        content = io.BytesIO()
        with zipfile.ZipFile(package) as packaged, zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for member in packaged.namelist():
                if member.endswith(".so"):
                    library = Path(packaged.extract(member, folder))
                    subprocess.run([_STRIP, "--strip-unneeded", library], check=True, capture_output=True)
                    archive.write(library, LIBRARY)
                elif member.endswith(".json") and not member.endswith("_metadata.json"):
                    archive.writestr(OPERATORS, packaged.read(member))
    return content.getvalue()
