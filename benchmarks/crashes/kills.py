"""Processes that are killed by SIGKILL, under load or before a chosen line, and what their banks are afterwards.

A helper imports everything once and forks a child for each life, which takes milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from adanpc import files
from adanpc.store import DurableBank, answers, durable, file, sqlite
from benchmarks.crashes.life import Account, ask, hash_of, judge, small_bank

ROOT = Path(__file__).parents[2]
THREADS = 4
WATCHED = tuple(module.__file__ for module in (files, answers, durable, file, sqlite))  # before whose lines one can die
FOR_EVER = 10**9  # requests; the child is killed before


class Life(NamedTuple):
    """What a child did before it died."""

    acknowledged: list[tuple[str, list[int], str]]  # requests, their keys, and hashes of their answers
    lines: list[str]  # that could have been its last
    end: int


# In the child


def under_load(folder: Path, seed: int) -> None:
    """Asks and judges from several threads until it is killed."""
    bank = DurableBank.open(folder, snapshot_every=20)

    def caller(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        key = (seed * THREADS + number) * 10**6
        for turn in range(FOR_EVER):
            key = ask(bank, chance, f"{seed}-{number}-{turn}", key, say)
            if not chance.randrange(8):
                judge(bank, chance)

    for number in range(THREADS):
        threading.Thread(target=caller, args=(number,)).start()


def step_by_step(folder: Path, seed: int) -> None:
    """Everything that a bank can do, one after another."""
    chance = random.Random(seed)
    key = seed * 10**6
    with DurableBank.open(folder, snapshot_every=10**6) as bank:
        for turn in range(3):
            key = ask(bank, chance, f"{seed}-{turn}", key, say)
        judge(bank, chance)
        bank.snapshot()
        key = ask(bank, chance, f"{seed}-more", key, say)
        bank.rollback(bank.position - 1, who="Ann")
        bank.snapshot()
        key = ask(bank, chance, f"{seed}-last", key, say)
        bank.compact(keep=1)
        ask(bank, chance, f"{seed}-end", key, say)


def say(request: str, keys: list[int], answer: str) -> None:
    tell({"request": request, "keys": keys, "answer": answer})


def tell(message: dict[str, Any]) -> None:
    """One line to whoever started this, in one write, so that lines of threads do not mix."""
    os.write(1, (json.dumps(message) + "\n").encode())


def trace_until(last: int, names: list[str]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that dies before a line of the watched modules, the one after so many others."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if path not in WATCHED:
            return None
        if event == "line":
            if len(names) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            names.append(f"{Path(path).name}:{frame.f_code.co_name}:{frame.f_lineno}")
        return trace

    return trace


def child(order: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    folder = Path(order["folder"])
    if order["last"] is None:
        under_load(folder, order["seed"])
        return
    names: list[str] = []
    trace = trace_until(order["last"], names)
    threading.settrace(trace)
    sys.settrace(trace)
    step_by_step(folder, order["seed"])
    sys.settrace(None)
    tell({"lines": names})


def helper() -> None:
    """Forks a child for each order that comes in."""
    for line in sys.stdin:
        process = os.fork()
        if not process:
            try:
                child(json.loads(line))
            finally:
                for thread in threading.enumerate():
                    if thread is not threading.current_thread() and not thread.daemon:
                        thread.join()
                os._exit(0)
        tell({"child": process})
        _, status = os.waitpid(process, 0)
        tell({"end": os.waitstatus_to_exitcode(status)})


# In the parent


@contextmanager
def started() -> Iterator[subprocess.Popen[str]]:
    """A running helper."""
    command = [sys.executable, "-m", "benchmarks.crashes.kills"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    with process:
        try:
            yield process
        finally:  # a child that lives for ever would keep the helper, and us, for ever
            for children in Path(f"/proc/{process.pid}/task/{process.pid}").glob("children"):
                for number in children.read_text().split():
                    os.kill(int(number), signal.SIGKILL)


def live(process: subprocess.Popen[str], folder: Path, seed: int, *, last: int | None, patience: int = 0) -> Life:
    """Lets a child live, until its last line or until it is killed a little after so many answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"folder": str(folder), "seed": seed, "last": last}) + "\n")
    chance = random.Random(seed)
    acknowledged: list[tuple[str, list[int], str]] = []
    lines: list[str] = []
    number = 0
    while True:
        message = json.loads(process.stdout.readline())
        number = message.get("child", number)
        lines = message.get("lines", lines)
        if "request" in message:
            acknowledged.append((message["request"], message["keys"], message["answer"]))
        if "end" in message:
            return Life(acknowledged, lines, message["end"])
        if last is None and number and len(acknowledged) >= patience:
            time.sleep(chance.uniform(0, 0.004))
            os.kill(number, signal.SIGKILL)
            patience = 10**9


def check_survivors(folder: Path, aside: Path, account: Account, life: Life, start: int) -> int:
    """Asserts that a bank has all that was acknowledged, nothing by halves, and is what its changes lead to.

    It is looked at in a copy, so that the next child finds what the last one left.

    Returns:
        The position to which the bank came back.
    """
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside)
    with DurableBank.open(aside) as bank:
        assert not bank.notices, bank.notices
        known = len(account.digests)
        account.follow(aside, start)
        assert bank.position == start + len(account.digests) - 1
        assert bank.digest() == account.digests[-1]
        together = account.keys[known:]
        for request, keys, answer in life.acknowledged:
            kept = bank.log.answer(request)
            assert kept is not None, f"{request} was acknowledged and is lost"
            assert hash_of(kept) == answer
            assert any(set(keys) <= set(joined) for joined in together), f"{request} is in the log in part"
        joined = [key for keys in together for key in keys]
        assert len(joined) == len(set(joined)), "something entered twice"
        return bank.position


def kills_under_load(count: int, place: Path) -> int:
    """Kills one process after another that works on the same bank; how many answers were acknowledged."""
    folder = place / "bank"
    small_bank(folder)
    account = Account(folder)
    start = account.classifier.position
    acknowledged = 0
    with started() as process:
        for seed in range(count):
            life = live(process, folder, seed, last=None, patience=random.Random(seed).randrange(30))
            assert life.end == -signal.SIGKILL
            check_survivors(folder, place / "copy", account, life, start)
            acknowledged += len(life.acknowledged)
    return acknowledged


def kills_before_lines(count: int, place: Path) -> list[str]:
    """Kills processes, each with a bank of its own, before chosen lines; the names of these lines."""
    original = place / "original"
    small_bank(original)
    names = []
    with started() as process:
        shutil.copytree(original, place / "whole")
        lines = live(process, place / "whole", 1, last=10**9).lines
        for last in _chosen(lines, count):
            folder = place / "bank"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(original, folder)
            life = live(process, folder, 1, last=last)
            names.append(lines[last])
            _check_one_life(original, folder, place / "copy", life)
    return names


def _chosen(lines: list[str], count: int) -> list[int]:
    """The numbers of lines before which to die: the first time that each is reached, and others between."""
    first = sorted({name: number for number, name in reversed(list(enumerate(lines)))}.values())
    if count < len(first):
        return random.Random(0).sample(first, count)
    others = sorted(set(range(len(lines))) - set(first))
    return first + random.Random(0).sample(others, min(count - len(first), len(others)))


def _check_one_life(original: Path, folder: Path, aside: Path, life: Life) -> None:
    """Asserts what can be said of a bank whose log may have been compacted."""
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside)
    with DurableBank.open(aside) as bank:
        assert not bank.notices, bank.notices
        begun = bank.log.start
        for request, _, answer in life.acknowledged:
            kept = bank.log.answer(request)
            assert kept is not None, f"{request} was acknowledged and is lost"
            assert hash_of(kept) == answer
        if begun == Account(original).classifier.position:
            account = Account(original)
            account.follow(aside, begun)
            assert bank.digest() == account.digests[-1]
        key = ask(bank, random.Random(5), "afterwards", 10**12, lambda *_: None)
        assert key > 10**12
        digest = bank.digest()
    with DurableBank.open(aside) as bank:
        assert bank.digest() == digest


if __name__ == "__main__":
    helper()
