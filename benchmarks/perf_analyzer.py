"""Triton's own load generator, from the tritonclient wheel that has it for Debian 12."""

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.workload import Arrays

# Later wheels have no perf_analyzer that runs here.
WHEEL = "tritonclient==2.51.0"
_TRIES = 3
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


@dataclass(frozen=True, slots=True)
class Measured:
    """What some clients got, each sending its next request when the last is answered."""

    answers_per_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """The program, and the folders of its libraries."""

    program: Path
    libraries: tuple[Path, ...]

    @classmethod
    def fetch(cls, folder: Path) -> "PerfAnalyzer":
        """Take it out of its wheel, which pip brings, into `folder`."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/perf_analyzer")]
            program = Path(archive.extract(name, folder))
        program.chmod(0o755)
        pytriton = find_spec("pytriton")
        assert pytriton is not None
        assert pytriton.origin is not None
        bundled = Path(pytriton.origin).parent.parent / "nvidia_pytriton.libs"
        for name, pattern in _LIBRARIES.items():  # there under longer names
            (library,) = bundled.glob(pattern)
            (folder / name).symlink_to(library)
        return cls(program, (folder, bundled))

    def run(self, url: str, model: str, requests: Path, clients: int, seconds: float) -> Measured:
        """`clients` at once, for three windows of `seconds`."""
        command = [
            str(self.program),
            *("-m", model, "-i", "grpc", "-u", url, "-b", "1", "--input-data", str(requests)),
            *("--concurrency-range", str(clients), "--measurement-interval", str(int(1000 * seconds))),
            *("--stability-percentage", "999", "--max-trials", "3"),
        ]
        libraries = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, self.libraries))}
        # It gives up on a run that was disturbed, with status 2.
        for _ in range(_TRIES):
            done = subprocess.run(command, env=os.environ | libraries, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break

        def number(pattern: str) -> float:
            match = re.search(pattern, done.stdout)
            assert match is not None, done.stdout + done.stderr
            return float(match[1])

        return Measured(
            answers_per_s=number(r"throughput: ([0-9.]+)"),
            p50_s=number(r"p50 latency: (\d+) usec") / 1e6,
            p99_s=number(r"p99 latency: (\d+) usec") / 1e6,
        )


def write_requests(path: Path, requests: list[Arrays]) -> None:
    """The file that perf_analyzer sends from, again and again."""
    data = [
        {
            name: {"content": array.tolist(), "shape": [array.size]}
            for name, array in (("values", request.values), ("lengths", request.lengths))
        }
        for request in requests
    ]
    path.write_text(json.dumps({"data": data}))
