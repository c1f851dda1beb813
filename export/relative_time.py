"""How long one call takes beside another."""

from collections.abc import Callable
from statistics import median
from time import thread_time

import torch

# Rounds in which two calls take turns, after calls that compile TorchScript.
_ROUNDS, _FIRST_CALLS = 15, 4

Call = Callable[[], object]


def relative_time(one: Call, other: Call) -> float:
    """The median processor time of `other` divided by that of `one`, with one thread, as in a server.

    They take turns, and waiting does not count: what else the machine does slows both alike.
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
    started = thread_time()
    call()
    return thread_time() - started
