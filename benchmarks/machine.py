"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe() -> str:
    """One line: processor, cores, threads, memory, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory:.0f} GiB, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
