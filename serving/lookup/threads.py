"""A pool of threads that share the work of a call with the calling thread."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue


class Threads:
    """Threads that sleep until there is work. They end with `close`, or when this object is deleted.

    Args:
        count: the number of threads, without the calling one.
    """

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # They refer to the tasks, not to this object, which would otherwise never be deleted.
        threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"lookup {number}", daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._tasks, threads)

    def close(self) -> None:
        """End the threads. A later `run` does all work on the calling thread."""
        self._end()

    def run(self, work: Sequence[Callable[[], object]]) -> None:
        """Do all items of `work`, the first one on the calling thread, and return when all are done.

        After its first item, the calling thread does items that no other thread has begun, so that on a busy machine
        it does not wait for a thread to wake up.

        Raises:
            Exception: the first exception of an item, after all items are done.
        """
        tasks = [_Task(work_item) for work_item in work]
        if self._end.alive:
            for task in tasks[1:]:
                self._tasks.put(task)
        for task in tasks:
            task.do()
        errors = [task.wait() for task in tasks]
        for error in filter(None, errors):
            raise error


class _Task:
    """An item of work, and a lock that is released when it is done. A caller may stop waiting at any time."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._begun = threading.Lock()
        self._undone = threading.Lock()
        self._undone.acquire()

    def do(self) -> None:
        """Do the work, and keep its exception. If another thread has begun it, return at once."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._undone.release()

    def wait(self) -> BaseException | None:
        """Wait until the work is done. Returns its exception, if it raised one."""
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
