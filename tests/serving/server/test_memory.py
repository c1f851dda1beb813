"""The memory of processes, compared with what others say of it."""

import mmap
import subprocess
import sys
from pathlib import Path

import psutil

from serving.server.status import process_memory

MAPS_AND_WAITS = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    tables = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    tables[0]
print("mapped", flush=True)
time.sleep(600)
"""


def test_the_memory_of_a_process_is_what_psutil_says(tmp_path: Path) -> None:
    weights = tmp_path / "weights.0.bin"
    weights.write_bytes(bytes(3 * mmap.PAGESIZE + 1))
    command = [sys.executable, "-c", MAPS_AND_WAITS, str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "mapped\n"
            memory, expected = process_memory(process.pid), psutil.Process(process.pid).memory_full_info()
            assert memory is not None
            assert memory.mapped == 4 * mmap.PAGESIZE
            # Whoever starts or ends in between shares some of its pages.
            assert abs(memory.share - expected.pss) < expected.pss / 2
            assert memory.share <= memory.resident
        finally:
            process.kill()
    assert process_memory(process.pid) is None
