"""Worker processes: each holds one object and does one task on it at a time; one that dies is reported and replaced.

Processes are spawned, not forked: a fork would copy locks that other threads (torch's, the live view's) hold at that
moment. A script that starts workers therefore needs `if __name__ == "__main__":`.
"""

import logging
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from fedbat.errors import FedbatError, MethodError

_LOG = logging.getLogger(__name__)
_SPAWN = get_context("spawn")
_STILLBORN = 3  # this many processes in a row may die at startup, in place of one that was once ready
_WINDOW = 8  # tasks per worker within which one may overtake another; results that are early wait in memory


class Task(NamedTuple):
    """A method to call on what a worker holds."""

    deed: str  # for the message if the worker dies: it did so while it "trained client 17"
    method: str
    args: Callable[[], tuple[Any, ...]]  # called when the task starts
    size: int = 0  # larger tasks start first, so that no long one is left for the end


class Died(NamedTuple):
    """What became of a task on which two workers died."""

    reason: str


class Workers:
    """Processes that outlive tasks and deaths, and even engines if they are handed on; started by the first `run`.

    Daemons end with this process; workers that are none may start workers of their own, and have to be closed.
    """

    def __init__(self, num: int, *, daemon: bool = True) -> None:
        self._num, self._daemon = num, daemon
        self._workers: list[_Worker] = []
        self._running = False

    def run(self, tasks: Sequence[Task], make: Callable[[], object]) -> Iterator[Any]:
        """Yield the result of each task, in order, as soon as it and all before it are there.

        They are done on the object that `make` returns; a worker calls it once, until it is given a task with another.
        A task whose worker dies is tried once more; after a second death its result is a `Died`. An error in a worker
        is raised here as it was there.
        """
        if self._running:
            raise MethodError(
                "the workers were given new tasks before all results of the last were taken; finish the round first: "
                "take all that train() yields, or close() it, and then test or train again"
            )
        return self._results(tasks, make)

    def _results(self, tasks: Sequence[Task], make: Callable[[], object]) -> Iterator[Any]:
        self._workers = self._workers or [_Worker(number, self._daemon) for number in range(self._num)]
        window = _WINDOW * len(self._workers)
        queue = deque(sorted(range(len(tasks)), key=lambda index: (index // window, -tasks[index].size)))
        found: dict[int, Any] = {}
        deaths: dict[int, str] = {}
        coming = 0
        self._running = True
        try:
            for worker in self._workers:
                worker.revive()
            while coming < len(tasks):
                for worker in self._workers:
                    if queue and worker.idle:
                        first = queue.popleft()
                        worker.give(first, tasks[first], make)
                if coming in found:  # the caller makes use of it while the workers go on
                    yield found.pop(coming)
                    coming += 1
                    continue
                for worker in self._heard_of():
                    index, reply = worker.take()
                    if index is None:
                        continue  # the worker has only said that it is ready
                    if isinstance(reply, _Failure):
                        reply.error.add_note(f"{worker} failed while it {tasks[index].deed}:\n{reply.trace}")
                        worker.end()
                        raise reply.error
                    if isinstance(reply, Died):
                        reason = f"{reply.reason} while it {tasks[index].deed}"
                        if index not in deaths:
                            _LOG.warning("%s; it is tried once more", reason)
                            deaths[index] = reason
                            queue.appendleft(index)
                            continue
                        reply = Died(f"{deaths[index]}; tried again, {reason}")
                    found[index] = reply
        finally:
            self._running = False
            for worker in self._workers:
                if worker.index is not None:  # nobody waits for its task any more
                    worker.end()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()

    def _heard_of(self) -> list["_Worker"]:
        """The workers that have said something or died; waits for the first."""
        awaited = [worker for worker in self._workers if not worker.idle]
        said = wait([handle for worker in awaited for handle in (worker.pipe, worker.process.sentinel)])
        return [worker for worker in awaited if worker.pipe in said or worker.process.sentinel in said]


class _Worker:
    """A numbered worker: one process at a time."""

    def __init__(self, number: int, daemon: bool) -> None:
        self.number, self.daemon = number, daemon
        self.served = False  # whether any process under this number has been ready
        self.stillborn = 0  # how many processes since then have not
        self.start()

    def start(self) -> None:
        self.ready = False  # until it has said so
        self.index: int | None = None  # of the task at hand
        self.made: Callable[[], object] | None = None
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=self.daemon)
        with _inherited():
            self.process.start()
        theirs.close()

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.process.pid})"

    @property
    def idle(self) -> bool:
        return self.ready and self.index is None

    def revive(self) -> None:
        """Start a new process if the old one was ended, or died while it had nothing to do."""
        if self.idle and not self.pipe.closed and not self.process.is_alive():
            _LOG.warning("%s died while it had nothing to do; a new one takes its place", self)
            self.end()
        if self.pipe.closed:
            self.start()

    def give(self, index: int, task: Task, make: Callable[[], object]) -> None:
        """Send a task, and the object to hold if that is new."""
        # The object to hold is sent the way torch does it, its tensors by reference to shared memory. A task is sent by
        # value: each tensor sent by reference would keep a file open for as long as it lives.
        message = None if make is self.made else make, pickle.dumps((task.method, task.args()))
        self.index, self.made = index, make
        with suppress(OSError):  # it has just died; `take` will say so
            self.pipe.send(message)

    def take(self) -> tuple[int | None, Any]:
        """The task at hand and what became of it; no task if the worker has only said that it is ready."""
        index = self.index
        try:
            if not self.pipe.poll():  # dead: only a child of its own keeps the pipe open
                raise EOFError
            reply = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            reply = self._bury()
        else:
            self.ready, self.index = True, None
            self.served, self.stillborn = True, 0
        return index, reply

    def _bury(self) -> Died:
        self.process.join()
        code = self.process.exitcode or 0
        died = f"{self} {f'died with signal {-code}' if code < 0 else f'ended with exit code {code}'}"
        if not self.ready:
            self.stillborn += 1
            if not self.served or self.stillborn > _STILLBORN:
                raise FedbatError(
                    f"{died} while it started; a script that runs experiments in parallel needs to be a file, with "
                    'if __name__ == "__main__": around what it does; or use --engine sequential, from Python '
                    'make_engine(federation, "sequential")'
                )
            _LOG.warning("%s while it started; a new one takes its place", died)
        self.end()
        self.start()
        return Died(died)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.index = None


@contextmanager
def _inherited() -> Iterator[None]:
    """What a process started inside inherits: it ignores Ctrl-C, since its parent ends it; malloc uses huge pages."""
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    chosen = os.environ.get("GLIBC_TUNABLES")  # the user's own choice stays
    os.environ["GLIBC_TUNABLES"] = chosen or "glibc.malloc.hugetlb=1"
    try:
        yield
    finally:
        if chosen is None:
            del os.environ["GLIBC_TUNABLES"]
        if heard is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)


class _Failure(NamedTuple):
    error: Exception
    trace: str


def _serve(pipe: Connection) -> None:
    """The life of a worker, until its parent ends it; Ctrl-C is for the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocking it is not enough: the first child starts without the block
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe.send_bytes(pickle.dumps("ready"))
    holds: object = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        reply: Any
        try:
            make, task = pickle.loads(message)
            method, args = pickle.loads(task)
            if make:
                holds = None  # free the old object before making the new one
                holds = make()
            reply = getattr(holds, method)(*args)
        except Exception as error:
            reply = _Failure(_travelling(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(reply))


def _end_with_parent() -> None:
    """End with the parent, however it ends and whatever this process is doing."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _travelling(error: Exception) -> Exception:
    """The error, or if it cannot be pickled, another with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def usable_cores() -> int:
    """How many cores this process may use, by affinity and container; 1 if it may not start processes."""
    if current_process().daemon:
        return 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(bound, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return bound
