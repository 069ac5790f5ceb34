"""A durable bank after kills, power cuts and flipped bytes; ``python -m benchmarks.crashes`` does it for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attacks.forging import PATIENCE

from adanpc.store import DurableBank
from benchmarks.crashes.flips import flips_of_a_closed_bank, flips_of_a_crashed_bank
from benchmarks.crashes.kills import kills_before_lines, kills_under_load
from benchmarks.crashes.life import small_bank

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes and files are watched through /proc")


@linux
def test_nothing_acknowledged_is_lost_when_a_busy_process_is_killed(tmp_path: Path) -> None:
    assert kills_under_load(5 * PATIENCE, tmp_path) > 0


@linux
def test_a_process_may_be_killed_before_any_line(tmp_path: Path) -> None:
    names = kills_before_lines(12 * PATIENCE, tmp_path)
    assert {"sqlite.py", "durable.py"} <= {name.partition(":")[0] for name in names}


@linux
def test_nothing_acknowledged_is_lost_when_the_power_is_cut(tmp_path: Path) -> None:
    pytest.importorskip("apsw")
    from benchmarks.crashes.power import power_cuts  # noqa: PLC0415

    for seed in range(PATIENCE):
        found = power_cuts(25, tmp_path / str(seed), seed)
        assert found["acknowledged"] > 0


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
