"""How long one call takes beside another."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

# Rounds in which two calls take turns, after calls that compile TorchScript.
_ROUNDS, _FIRST_CALLS = 15, 4

Call = Callable[[], object]


def relative_time(one: Call, other: Call) -> float:
    """The median time of `other` divided by that of `one`, with one thread, as in a server.

    They take turns: what else the machine does slows both.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for _ in range(_FIRST_CALLS):
                one(), other()
            rounds = [(_seconds(one), _seconds(other)) for _ in range(_ROUNDS)]
            return median(of_other / of_one for of_one, of_other in rounds)
    finally:
        torch.set_num_threads(threads)


def _seconds(call: Call) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started
