"""The environment of a measurement: machine, versions, command and commit."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import torch

NOTED = ("adanpc", "numpy", "torch", "torchvision", "timm", "numkong", "scikit-learn", "pillow")  # can change numbers
CPU_INFO = Path("/proc/cpuinfo")  # on Linux
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of a commit, SHA-1 or SHA-256
REF = re.compile(r"refs/[\w./@+-]+")  # the name of a branch
LARGEST = 16 * 2**20  # bytes that are read from a git folder; packed-refs of the largest repositories are smaller


def machine() -> str:
    """The machine in one line: processor, cores, threads, memory, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory:.0f} GiB, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def _processor() -> str:
    """The name of the processor, in as much detail as the platform gives."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor()


def environment() -> dict[str, object]:
    """Everything that is needed to repeat a run, apart from its own settings."""
    return {
        "machine": machine(),
        "accelerators": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "versions": dict(_versions()),
        "command": command(),
        "commit": commit(),
    }


@cache  # it reads the files of all installed packages, and a sweep needs it for each of its runs
def _versions() -> tuple[tuple[str, str], ...]:
    """The packages in ``NOTED`` that are installed, each with its version."""
    installed = {package.metadata["Name"].lower(): package.version for package in distributions()}
    return tuple((name, installed[name]) for name in NOTED if name in installed)


def command() -> str:
    """The command line of this process, quoted so that it can be typed again."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "adanpc"
    return shlex.join([program, *sys.argv[1:]])


def commit() -> str:
    """The commit that is checked out in the working folder; empty outside of a repository.

    It is read from git's files as plain text. Git itself is never run: the configuration of a repository may name
    programs for git to start (``core.fsmonitor``, filters), and the folder may come from anyone. So it is not known
    whether files have changed since the commit.
    """
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / ".git").exists():
            return _checked_out(folder / ".git")
    return ""


def _checked_out(git: Path) -> str:
    """The commit of a ``.git`` folder, or of the ``.git`` file that a worktree has instead."""
    if git.is_file():
        pointer = _text(git.parent, git.name).strip()
        if not pointer.startswith("gitdir: "):
            return ""
        git = git.parent / pointer.removeprefix("gitdir: ")
    head = _text(git, "HEAD").strip()
    if HASH.fullmatch(head):
        return head
    branch = head.removeprefix("ref: ")
    if not REF.fullmatch(branch):
        return ""
    shared = git / (_text(git, "commondir").strip() or ".")  # a worktree has no branches of its own
    return _commit_of(shared, branch)


def _commit_of(git: Path, branch: str) -> str:
    """The commit of a branch, from the branch's own file or from ``packed-refs``."""
    loose = _text(git, branch).strip()
    if HASH.fullmatch(loose):
        return loose
    for line in _text(git, "packed-refs").splitlines():
        found, _, name = line.partition(" ")
        if name == branch and HASH.fullmatch(found):
            return found
    return ""


def _text(folder: Path, name: str) -> str:
    """The text of a small file in a folder; empty if there is none, or if a link leads out of the folder."""
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder.resolve())
        if not inside or not path.is_file() or path.stat().st_size > LARGEST:
            return ""
        return path.read_text(errors="replace")
    except (OSError, ValueError):  # it may be unreadable, or its name invalid
        return ""
