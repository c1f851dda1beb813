"""How much freed memory a process keeps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.freed_memory import KEPT_BYTES
from serving.server.child_process import GLIBC, malloc_environment

ROOT = Path(__file__).parents[2]


# Faults for a page of 4 KiB that 20 times five answers of 8 MB take, after the first of them.
_LARGE_ANSWERS = """
import resource, sys
import torch
from serving.freed_memory import FreedMemory

def faults():
    for _ in range(20):
        [torch.ones(2 << 20) for _ in range(5)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    FreedMemory()
first = faults()
print(faults() - first)
"""


def test_a_large_answer_takes_the_memory_of_the_one_before() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", _LARGE_ANSWERS, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)

    assert faults("kept") < 1000
    # What glibc does by itself, unless something small happens to lie behind the answers.
    assert any(faults("freed") > 10_000 for _ in range(20))


# Four threads free some 600 MB in pieces of all sizes, with small objects between them that stay. How many MB more than
# at first the process then has, and after a look; and after a look that came when all was in use again.
_MUCH_IS_FREED = """
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from serving.freed_memory import FreedMemory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

def pieces(seed):
    random = np.random.default_rng(seed)
    return [(np.ones(random.integers(1 << 10, 1 << 18)), np.ones(100)) for _ in range(150)]

def freed():
    large = [*pool.map(pieces, range(4))]
    stay.append([small for every in large for _, small in every])
    return resident() - before

freed_memory, before, stay = FreedMemory(), resident(), []
with ThreadPoolExecutor(4) as pool:
    in_use = freed()
    kept = resident() - before
    freed_memory.give_back()
    left = resident() - before
    in_use_again = [*pool.map(pieces, range(4, 8))]
    freed_memory.give_back()
    stay.append([small for every in in_use_again for _, small in every])
    del in_use_again
    freed_memory.give_back()
    print(in_use, kept, left, resident() - before)
"""


@pytest.mark.parametrize("malloc", [malloc_environment(), GLIBC], ids=["tcmalloc", "glibc"])
def test_freed_memory_beyond_the_limit_is_returned(malloc: dict[str, str]) -> None:
    command = [sys.executable, "-c", _MUCH_IS_FREED]
    said = subprocess.check_output(command, env=os.environ | {"LD_PRELOAD": ""} | malloc, text=True, cwd=ROOT)
    in_use, cached, remaining, left_again = map(int, said.split())
    assert min(in_use, cached) > 400, "it keeps what is freed"
    assert max(remaining, left_again) <= (KEPT_BYTES >> 20) + 16, "pieces of it are kept for small objects"
