"""Threads that work beside the one that calls."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue


class Threads:
    """Threads that sleep until there is work. They end with `close`, or with this object.

    Args:
        count: how many, beside the thread that calls.
    """

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # They know the tasks, and not this object: otherwise it would live as long as they do.
        threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"lookup {number}", daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._tasks, threads)

    def close(self) -> None:
        """End the threads. The next `run` does all work on the thread that calls."""
        self._end()

    def run(self, work: Sequence[Callable[[], object]]) -> None:
        """Do all of `work`, the first on the thread that calls, and return when it is done.

        What no thread has begun by then, this one does: on a busy machine nobody waits for a thread to wake up.

        Raises:
            Exception: the first that work raised, when all of it is done.
        """
        tasks = [_Task(each) for each in work]
        if self._end.alive:
            for task in tasks[1:]:
                self._tasks.put(task)
        for task in tasks:
            task.do()
        errors = [task.wait() for task in tasks]
        for error in filter(None, errors):
            raise error


class _Task:
    """Work, and a lock that is free when it is done. A task that its caller gave up waiting for harms no other."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._begun = threading.Lock()
        self._undone = threading.Lock()
        self._undone.acquire()

    def do(self) -> None:
        """Do the work, and keep what it raises. Who comes second leaves it to the first."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._undone.release()

    def wait(self) -> BaseException | None:
        """Wait until it is done; what the work raised."""
        self._undone.acquire()
        return self._error


def _work(tasks: "SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task.do()
        del task  # it holds a request and its answer


def _end(tasks: "SimpleQueue[_Task | None]", threads: Sequence[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        thread.join()
