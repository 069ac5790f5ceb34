"""A durable bank after kills, power cuts and flipped bytes; ``python -m benchmarks.crashes`` does it for longer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attacks.forging import PATIENCE

from adanpc.store import DurableBank
from benchmarks.crashes.flips import flips_of_a_closed_bank, flips_of_a_crashed_bank
from benchmarks.crashes.kills import kills_before_lines, kills_under_load
from benchmarks.crashes.life import small_bank

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes and files are watched through /proc")


@linux
def test_nothing_acknowledged_is_lost_when_a_busy_process_is_killed(tmp_path: Path) -> None:
    assert kills_under_load(5 * PATIENCE, tmp_path) > 0


@linux
def test_a_process_may_be_killed_before_any_line(tmp_path: Path) -> None:
    names = kills_before_lines(12 * PATIENCE, tmp_path)
    assert {"sqlite.py", "durable.py"} <= {name.partition(":")[0] for name in names}


@pytest.mark.no_cover
@linux
def test_nothing_acknowledged_is_lost_when_the_power_is_cut(tmp_path: Path) -> None:
    pytest.importorskip("apsw")
    from benchmarks.crashes.power import power_cuts  # noqa: PLC0415

    for seed in range(PATIENCE):
        found = power_cuts(25, tmp_path / str(seed), seed)
        assert found["acknowledged"] > 0


@pytest.mark.no_cover
def test_a_byte_that_is_altered_is_noticed(tmp_path: Path) -> None:
    step = max(1, 97 // PATIENCE)
    flips_of_a_closed_bank(tmp_path, step)
    counts = flips_of_a_crashed_bank(tmp_path, 9 * step)
    assert counts["log.sqlite-wal"][0] > 0


FULL = """
import json, resource, signal, sys
from pathlib import Path
import torch
from adanpc.errors import AdaNPCError
from adanpc.store import DurableBank, LogWriteError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
bank = DurableBank.open(folder)
most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, most[1]))  # no file may grow beyond, as on a disk that is full
answered = 0
sentence = ""
while not sentence:
    before = bank.digest(), bank.position
    try:
        bank.classify(torch.randn(20, 8), request=str(answered))
    except LogWriteError as error:
        sentence = str(error)
        same = (bank.digest(), bank.position) == before
    else:
        answered += 1
read = bank.predict(torch.randn(1, 8)).labels.tolist()
resource.setrlimit(resource.RLIMIT_FSIZE, most)
bank.classify(torch.randn(1, 8), request="afterwards")
digest = bank.digest()
bank.close()
print(json.dumps({"sentence": sentence, "answered": answered, "same": same, "read": len(read), "digest": digest}))
"""


@pytest.mark.skipif(os.name != "posix", reason="a limit on the size of files stands for a full disk")
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    small_bank(tmp_path / "bank")
    output = subprocess.check_output([sys.executable, "-c", FULL, str(tmp_path / "bank")], text=True)
    found = json.loads(output)
    assert "was not written to, and nothing has changed: " in found["sentence"]
    assert "\n" not in found["sentence"]
    assert found["answered"] > 0
    assert found["same"]
    assert found["read"] == 1
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == found["digest"]
        assert all(bank.log.answer(str(number)) is not None for number in range(found["answered"]))
        assert bank.log.answer("afterwards") is not None
        assert bank.log.answer(str(found["answered"])) is None  # it was refused


AGAIN_AND_AGAIN = """
import json, os, random, subprocess, sys
from pathlib import Path
import torch
from adanpc import Veto
from adanpc.errors import AdaNPCError
from adanpc.store import DurableBank, verify
from benchmarks.crashes.life import features, small_bank
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", place], check=True)
chance = random.Random(int(sys.argv[2]))
small_bank(place / "bank")
filler = place / "filler"
bank = DurableBank.open(place / "bank", snapshot_every=3)
sentences = []
answered = []
for turn in range(40):
    if not chance.randrange(4):
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        with filler.open("ab") as file:
            file.write(bytes(max(0, free - chance.choice([0, 4096, 16384, 40000]))))
    if not chance.randrange(6):
        filler.unlink(missing_ok=True)
    before = bank.position, bank.digest()
    kind = chance.randrange(6)
    try:
        if kind < 3:
            bank.classify(features(chance, chance.randrange(1, 40)), request=str(turn))
            answered.append(str(turn))
        elif kind == 3:
            bank.apply(Veto((chance.randrange(24),), "Ann", "x" * 5000))
        elif kind == 4:
            bank.rollback(chance.randrange(bank.log.start, bank.position + 1))
        else:
            bank.compact(keep=2)
    except AdaNPCError as error:
        sentences.append(str(error))
        assert (bank.position, bank.digest()) == before
    bank.predict(features(chance, 1))
    if not chance.randrange(10):
        digest = bank.digest()
        bank.close()
        bank = DurableBank.open(place / "bank", snapshot_every=3)
        assert bank.digest() == digest
digest = bank.digest()
assert all(bank.log.answer(request) is not None for request in answered)
filler.unlink(missing_ok=True)
bank.close()
report = verify(place / "bank")
assert not report.problems, report.problems
assert report.digest == digest
print(json.dumps({"sentences": sentences, "answered": len(answered)}))
"""
OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def may_mount() -> bool:
    """Whether a process may have a disk of its own, small enough to be filled."""
    if shutil.which("unshare") is None:
        return False
    trial = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def test_a_disk_that_is_full_again_and_again_loses_nothing(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("no process may have mounts of its own here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    sentences = []
    for seed in range(2 * PATIENCE):
        command = [*OWN_MOUNTS, sys.executable, "-c", AGAIN_AND_AGAIN, str(tmp_path), str(seed)]
        found = json.loads(subprocess.check_output(command, text=True, env=environment))
        assert found["answered"] > 0
        sentences += found["sentences"]
    assert sentences
    assert not any("cannot be read" in sentence or "\n" in sentence for sentence in sentences), sentences
