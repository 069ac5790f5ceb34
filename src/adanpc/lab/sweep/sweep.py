"""Running tasks: on all cores of this machine, or on a Ray cluster."""

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

from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.lab.data.loading import cores
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.task import Task
from adanpc.progress import track

MISSING = "missing"
PATIENCE = 10.0  # seconds until a cluster must answer
RETRIES = 3  # nodes that a task may lose; one that kills its process every time must not run for ever
Outcome = tuple[Task, dict[str, Any], float]  # the task, its record, seconds


def sweep(
    tasks: Iterable[Task], workspace: Workspace, records: Records, *, ray: str = "", workers: int | None = None
) -> list[str]:
    """Runs every task that has no record yet, after what it needs, and records each as it is finished.

    Returns what could not be run because something is missing or damaged, each reason once; that is not recorded, so
    that another call tries again. What ends it early also ends the tasks at hand: another call runs them again, and
    training goes on from where it was last saved.

    Args:
        tasks: in the order in which they are wanted.
        workspace: where data lie and models are kept; on a cluster, folders that every node has under the same path.
        records: one process writes them: this one.
        ray: the address of a Ray cluster; by default the cores of this machine are used.
        workers: processes on this machine, by default one for each core. With one, everything runs in this process.
    """
    missing: dict[str, None] = {}
    with records.writing():
        agenda = Agenda(ahead(tasks, records))
        if not len(agenda):
            return []
        run = (
            _on_ray(agenda, workspace, ray)
            if ray
            else _here(agenda, workspace, cores() if workers is None else workers)
        )
        with closing(run):
            for task, record, seconds in (bar := track(run, "tasks", len(agenda))):
                if MISSING in record:
                    missing[record[MISSING]] = None
                else:
                    records.add(task, record, seconds, {name: workspace.count(name) for name in task.data()})
                agenda.finish(task)
                bar.note(task.kind)
    return list(missing)


def ahead(tasks: Iterable[Task], records: Records) -> list[Task]:
    """The tasks that have no record and what must come first, each once, in an order in which they can be run."""
    found: dict[str, Task] = {}
    for task in tasks:
        if task not in records:
            if (first := task.first()) and first not in records:
                found.setdefault(first.id, first)
            found.setdefault(task.id, task)
    return list(found.values())


class Agenda:
    """Tasks that wait to be run. Those that need another come next once it is finished, so that results come early.

    Args:
        tasks: each once, with all that they need.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.ready: deque[Task] = deque()
        self.waiting: dict[str, list[Task]] = {task.id: [] for task in tasks}
        for task in tasks:
            first = task.first()
            self.waiting.get(first.id if first else "", self.ready).append(task)

    def __len__(self) -> int:
        return len(self.ready) + sum(map(len, self.waiting.values()))

    def take(self, most: int) -> list[Task]:
        """The next tasks, at most so many; none for now if all others wait."""
        return [self.ready.popleft() for _ in range(min(most, len(self.ready)))]

    def finish(self, task: Task) -> None:
        """Lets those come next that waited for a task."""
        self.ready.extendleft(reversed(self.waiting.pop(task.id)))


def left(tasks: Iterable[Task], records: Records, costs: CostModel, workers: int) -> float:
    """About how many seconds the tasks that have no record will take, corrected by those that have.

    The correction is what recorded tasks of the same kind took, beside what they were expected to take. However many
    workers there are, a task takes its time, after what it needs.
    """
    tasks = list(tasks)
    known = {each.id: each for task in tasks for each in (task, task.first()) if each and _measured(each, records)}
    coming = ahead(tasks, records)
    pace = {kind: _pace(kind, known.values(), records, costs) for kind in {task.kind for task in coming}}
    cost = {task.id: task.effort(costs) * pace[task.kind] for task in coming}

    def from_nothing(task: Task) -> float:
        first = task.first()
        return cost[task.id] + (cost.get(first.id, 0.0) if first else 0.0)

    longest = max(map(from_nothing, coming), default=0.0)
    return max(sum(cost.values()) / workers, longest)


def _measured(task: Task, records: Records) -> bool:
    """Whether the time it took tells anything; a refusal takes none."""
    return task in records and "error" not in records.entries[task.id]["record"]


def _pace(kind: str, known: Iterable[Task], records: Records, costs: CostModel) -> float:
    alike = [task for task in known if task.kind == kind]
    expected = sum(task.effort(costs) for task in alike)
    return sum(records.entries[task.id]["seconds"] for task in alike) / expected if expected else 1.0


def outcome(task: Task, workspace: Workspace) -> Outcome:
    """Runs a task. A method that refuses its model has that as its record; what is missing today has none."""
    start = time.perf_counter()
    try:
        record = task.run(workspace)
    except UnavailableError as error:
        record = {MISSING: str(error)}
    except AdaNPCError as error:
        record = {"error": str(error)}
    return task, record, time.perf_counter() - start


def _here(agenda: Agenda, workspace: Workspace, workers: int) -> Generator[Outcome, None, None]:
    """In processes of this machine, which end when this generator or its process does, whatever they are doing."""
    if workers == 1:
        while tasks := agenda.take(1):
            yield outcome(tasks[0], workspace)
        return
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    with reader, ProcessPoolExecutor(workers, context, _begin, (reader,)) as pool, writer:
        waiting: set[Future[Outcome]] = set()
        try:
            while True:
                with _no_interrupts():  # processes must never see Ctrl-C: it is this one that ends them
                    waiting |= {pool.submit(outcome, task, workspace) for task in agenda.take(workers - len(waiting))}
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda each: each.exception() is not None):  # what is finished first
                    yield future.result()
        except BrokenProcessPool:
            raise AdaNPCError(
                "a process was killed, by lack of memory perhaps; what was finished is recorded: run it again, or with "
                "fewer --workers"
            ) from None


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C waits until the end; processes that are started within never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(reader: Connection) -> None:
    """What a process does first: it takes one thread, and ends as soon as nobody holds the other end of the pipe."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(reader,), daemon=True).start()


def _end_with(reader: Connection) -> None:
    reader.poll(None)
    os._exit(1)


def _on_ray(agenda: Agenda, workspace: Workspace, address: str) -> Generator[Outcome, None, None]:
    """On the nodes of a cluster, one core a task; tasks of a node that dies are given to another.

    Ray has twice as many tasks as there are cores, so that none of them waits for this process.
    """
    ray = _cluster(address)
    try:
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(outcome)
        waiting: list[Any] = []
        while True:
            room = max(1, 2 * int(ray.cluster_resources().get("CPU", 1)) - len(waiting))
            waiting += [remote.remote(task, workspace) for task in agenda.take(room)]
            if not waiting:
                break
            done, waiting = ray.wait(waiting)
            yield from ray.get(done)
    except ray.exceptions.RayTaskError:  # what the task raised
        raise
    except ray.exceptions.RayError as error:
        raise AdaNPCError(
            f"the Ray cluster gave a task up ({_line(error)}); what was finished is recorded: run it again"
        ) from None
    finally:
        ray.shutdown()


def _cluster(address: str) -> Any:
    """Ray, connected; an address where nothing listens is refused here, since Ray would try for minutes."""
    try:
        ray = import_module("ray")
    except ImportError:
        raise AdaNPCError("Ray is not installed: pip install 'adanpc[cluster]'") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # not such as auto
            socket.create_connection((host, int(port)), PATIENCE).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise AdaNPCError(
            f"there is no Ray cluster to use at {address!r} ({_line(error)}): start one with ray start --head"
        ) from None
    return ray


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
