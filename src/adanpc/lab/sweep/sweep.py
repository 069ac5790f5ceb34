"""Run tasks on all cores of this machine, or on a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch

from adanpc import require
from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.lab.data.loading import cores
from adanpc.lab.sweep.forecast import Forecast
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.task import MISSING, Task
from adanpc.progress import track

PATIENCE = 10.0  # seconds within which a cluster must answer
RETRIES = 3  # times that Ray restarts a task whose node died; a task that always kills its process must not run forever
Outcome = tuple[Task, dict[str, Any], float]  # the task, its record, the seconds it took


def sweep(
    tasks: Iterable[Task],
    workspace: Workspace,
    records: Records,
    *,
    ray: str = "",
    workers: int | None = None,
    forecast: Forecast | None = None,
) -> list[str]:
    """Runs every task that has no record yet, prerequisites first, and records each one when it is finished.

    Returns the reasons why tasks could not run (something is missing or damaged), each reason once. These tasks get no
    record, so another call tries them again. If the sweep is interrupted, running tasks stop; the next call repeats
    them, and training continues from its last checkpoint.

    Args:
        tasks: in the order in which they are wanted.
        workspace: where data and models are; on a cluster, folders that every node has under the same path.
        records: where results are recorded; only this process writes to them.
        ray: the address of a Ray cluster; by default the cores of this machine are used.
        workers: processes on this machine, by default one per core. With one, everything runs in this process.
        forecast: tells how much time is left, which is shown; it must be of the same tasks.
    """
    if workers is None:
        workers = cores()
    require.whole("workers", workers, least=1)
    reasons: dict[str, None] = {}  # a dict serves as an ordered set: each reason once, in order of appearance
    with records.writing():
        schedule = Schedule(records.pending(tasks))
        if not len(schedule):
            return []
        outcomes = _on_ray(schedule, workspace, ray) if ray else _on_this_machine(schedule, workspace, workers)
        with closing(outcomes):
            progress = track(outcomes, "tasks", len(schedule))
            for task, record, seconds in progress:
                if MISSING in record:
                    reasons[record[MISSING]] = None
                else:
                    sizes = {name: workspace.count(name) for name in task.data()}
                    records.add(task, record, seconds, sizes)
                schedule.finish(task)
                progress.note(task.kind)
                if forecast is not None:
                    forecast.finish(task, record, seconds)
                    progress.expect(forecast.seconds(workers))
    return list(reasons)


class Schedule:
    """A queue of tasks. A task that needs another moves to the front once that is finished, so that results come early.

    Args:
        tasks: each once, together with their prerequisites.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.ready: deque[Task] = deque()
        self.waiting: dict[str, list[Task]] = {task.id: [] for task in tasks}  # by the id of their prerequisite
        for task in tasks:
            first = task.prerequisite()
            if first is not None and first.id in self.waiting:
                self.waiting[first.id].append(task)
            else:
                self.ready.append(task)

    def __len__(self) -> int:
        return len(self.ready) + sum(len(tasks) for tasks in self.waiting.values())

    def take(self, most: int) -> list[Task]:
        """The next tasks, at most ``most``; none if all that are left wait for a prerequisite."""
        number = min(most, len(self.ready))
        return [self.ready.popleft() for _ in range(number)]

    def finish(self, task: Task) -> None:
        """Moves the tasks that waited for this one to the front of the queue."""
        released = self.waiting.pop(task.id)
        self.ready.extendleft(reversed(released))


def outcome(task: Task, workspace: Workspace) -> Outcome:
    """Runs a task.

    If a method refuses its model, the refusal is the record. If data or a file is missing, there is no record, only the
    reason under ``MISSING``: it may be there tomorrow.
    """
    start = time.perf_counter()
    try:
        record = task.run(workspace)
    except UnavailableError as error:
        record = {MISSING: str(error)}
    except AdaNPCError as error:
        record = {"error": str(error)}
    return task, record, time.perf_counter() - start


def _on_this_machine(schedule: Schedule, workspace: Workspace, workers: int) -> Generator[Outcome, None, None]:
    """Runs tasks in worker processes, which end when this generator or its process ends, whatever they are doing."""
    if workers == 1:
        while tasks := schedule.take(1):
            yield outcome(tasks[0], workspace)
        return
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    # On the way out the writer closes first, which ends the workers; only then does the pool wait for them.
    with reader, ProcessPoolExecutor(workers, context, _start_worker, (reader,)) as pool, writer:
        running: set[Future[Outcome]] = set()
        try:
            while True:
                with _no_interrupts():  # workers must never see Ctrl-C: this process ends them
                    for task in schedule.take(workers - len(running)):
                        running.add(pool.submit(outcome, task, workspace))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                # Results before errors, so that results are recorded before an error ends the sweep.
                for future in sorted(done, key=lambda each: each.exception() is not None):
                    yield future.result()
        except BrokenProcessPool:
            raise AdaNPCError(
                "a worker process was killed, perhaps for lack of memory; finished tasks are recorded: run it again, "
                "or with fewer `workers`"
            ) from None


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Holds Ctrl-C back until the block ends. Processes that are started inside the block never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(reader: Connection) -> None:
    """Prepares a worker process: it uses one thread, and ends as soon as the other end of the pipe is closed."""
    torch.set_num_threads(1)
    threading.Thread(target=_exit_when_closed, args=(reader,), daemon=True).start()


def _exit_when_closed(reader: Connection) -> None:
    """Ends this process when its parent ends: that closes the pipe, and ``poll`` returns."""
    reader.poll(None)
    os._exit(1)


def _on_ray(schedule: Schedule, workspace: Workspace, address: str) -> Generator[Outcome, None, None]:
    """Runs tasks on the nodes of a cluster, one core per task; tasks of a node that dies move to another node.

    Ray is given twice as many tasks as there are cores, so that no core waits for this process.
    """
    ray = _cluster(address)
    try:
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(outcome)
        running: list[Any] = []
        while True:
            slots = 2 * int(ray.cluster_resources().get("CPU", 1))  # nodes may come and go
            for task in schedule.take(max(1, slots - len(running))):
                running.append(remote.remote(task, workspace))
            if not running:
                break
            done, running = ray.wait(running)
            yield from ray.get(done)
    except ray.exceptions.RayTaskError:  # what the task raised
        raise
    except ray.exceptions.RayError as error:
        raise AdaNPCError(
            f"the Ray cluster gave up on a task ({_one_line(error)}); finished tasks are recorded: run it again"
        ) from None
    finally:
        ray.shutdown()


def _cluster(address: str) -> Any:
    """The Ray module, connected to a cluster. An address where nothing listens is refused at once."""
    try:
        ray = import_module("ray")
    except ImportError:
        raise AdaNPCError("Ray is not installed: pip install 'adanpc[cluster]'") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # an address such as "auto" has no port
            # Ray itself would keep trying for minutes.
            socket.create_connection((host, int(port)), PATIENCE).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise AdaNPCError(
            f"there is no Ray cluster at {address!r} ({_one_line(error)}): start one with ray start --head"
        ) from None
    return ray


def _one_line(error: Exception) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())
