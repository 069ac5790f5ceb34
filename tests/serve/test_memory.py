"""Memory: what was freed goes back to the system, unless whoever runs the process has decided otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from adanpc.serve import memory

# The module of its own, without the rest of the package, which would import torch.
LOADED = f"""
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("memory", {memory.__file__!r})
memory = module_from_spec(spec)
spec.loader.exec_module(memory)
"""
# Six threads each hold 40 MiB in blocks of half a MiB to four, and a few bytes after them that they keep.
PROGRAM = """
import json, sys, threading
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

limited = sys.argv[1] == "limited" and memory.give_freed_memory_back()
kept = []
ready = threading.Barrier(6)

def work():
    for _ in range(5):
        blocks = [bytes(size * 2**19) for size in (1, 2, 4, 8) * 6]
        kept.append(bytearray(100_000))
        ready.wait()
        del blocks
        ready.wait()

before = resident()
threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({"limited": limited, "more": resident() - before}))
"""


def grown(how: str, program: str = PROGRAM, **variables: str) -> dict[str, Any]:
    """What the program says of itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", LOADED + program, how]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc of Linux keeps what was freed in this way")
def test_freed_memory_goes_back_to_the_system() -> None:
    limited = grown("limited")
    if not limited["limited"]:
        pytest.skip("this is another C library than glibc")
    assert limited["more"] < 120
    assert grown("unlimited")["more"] > 2 * limited["more"]


def test_the_variables_of_whoever_runs_the_process_count() -> None:
    assert not grown("limited", MALLOC_ARENA_MAX="4")["limited"]


SEARCHES = """
import json, sys
import numpy
from pathlib import Path

def faults():
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])

limited = memory.give_freed_memory_back(int(sys.argv[1]))
numpy.ones(3_200_000, numpy.float32)
before = faults()
for _ in range(20):
    numpy.ones(3_200_000, numpy.float32)  # 32 queries and 100,000 rows
print(json.dumps({"limited": limited, "more": faults() - before}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc of Linux is told what to keep")
def test_blocks_of_a_search_of_many_rows_are_used_again() -> None:
    many = grown("100000", program=SEARCHES)
    if not many["limited"]:
        pytest.skip("this is another C library than glibc")
    assert many["more"] < grown("0", program=SEARCHES)["more"] / 2
