"""What a number was measured with: machine, versions, command, commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import torch

NOTED = ("adanpc", "numpy", "torch", "torchvision", "timm", "numkong", "scikit-learn", "pillow")


def machine() -> str:
    """One line: processor, cores, threads, memory, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory:.0f} GiB, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def environment() -> dict[str, object]:
    """All that is needed to repeat a run, beside its own settings."""
    installed = {found.metadata["Name"].lower(): found.version for found in distributions()}
    return {
        "machine": machine(),
        "accelerators": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "versions": {name: installed[name] for name in NOTED if name in installed},
        "command": command(),
        "commit": commit(),
    }


def command() -> str:
    """The command line of this process, as it could be typed again."""
    program = Path(sys.argv[0]).name
    return shlex.join(["adanpc" if program == "__main__.py" else program, *sys.argv[1:]])


def commit() -> str:
    """The commit of the working folder, marked if files were changed since; empty outside of a repository."""
    try:
        asked = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
