"""Memory for answers is used again, by nobody who might still look at the last one, and there is never much of it."""

import gc
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.engine import Engine
from serving.lookup import buffer_pool, parallel_lookup
from serving.lookup.buffer_pool import BufferPool


def test_an_array_reuses_the_memory_of_a_freed_one() -> None:
    memory = BufferPool(torch.float32)
    first = memory.array(100, 10)
    assert first.dtype == np.float32
    assert first.shape == (100, 10)
    address = first.ctypes.data
    del first
    gc.collect()
    smaller = memory.array(30, 20)
    assert smaller.shape == (30, 20)
    assert smaller.ctypes.data == address


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[3:5, 1:],
        lambda array: array.reshape(-1)[7:],
        lambda array: array[3:5][np.newaxis].T,
        lambda array: array.view(np.int32),
        lambda array: memoryview(array),
        lambda array: torch.from_numpy(array)[1:],
        lambda array: np.asarray(memoryview(array)),
        lambda array: np.from_dlpack(array),
        lambda array: [*array],
    ],
)
def test_a_view_of_an_array_keeps_its_memory(view: object) -> None:
    memory = BufferPool(torch.float32)
    array = memory.array(8, 4)
    address = array.ctypes.data
    viewed = view(array)  # type: ignore[operator]
    del array
    gc.collect()
    assert memory.array(8, 4).ctypes.data != address
    del viewed


def test_callers_at_once_get_memory_of_their_own() -> None:
    memory, wrong = BufferPool(torch.float32), list[int]()

    def call(number: int) -> None:
        for _ in range(1000):
            array = memory.array(4, 4)
            array[:] = number
            time.sleep(0)
            if (array != number).any():
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5)), max_size=60),
    most=st.sampled_from([0, 400, 5000]),
)
def test_arrays_never_share_memory_and_the_pool_is_bounded(steps: list[tuple[int, int, int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_pool, "MOST", most)
        memory = BufferPool(torch.float16)
        arrays: list[tuple[npt.NDArray[Any], int]] = []
        for number, (rows, columns, freed) in enumerate(steps):
            array = memory.array(rows, columns)
            assert array.shape == (rows, columns)
            array[:] = number
            arrays.append((array, number))
            del array
            for kept_array, expected in arrays:
                assert (kept_array == expected).all()
            arrays = arrays[freed:]
        assert sum(block.memory.nbytes for block in memory._blocks) <= most


def test_later_requests_do_not_change_earlier_answers(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("LEAST", "HEAD_START", "CALL"):
        monkeypatch.setattr(parallel_lookup, size, 0)
    with Engine.open(mixed, threads=2) as engine:
        requests = [{"genres": [[number % 20], [1]]} for number in range(20)]
        expected = [engine.lookup(features)["genres"].tobytes() for features in requests]
        views = [engine.lookup(features)["genres"][:, 1:] for features in requests]
        for answer, all_of_it in zip(views, expected, strict=True):
            whole = np.frombuffer(all_of_it, np.float32).reshape(2, -1)
            np.testing.assert_array_equal(answer, whole[:, 1:])
