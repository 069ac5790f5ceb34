"""Records of long tables that are kept in benchmarks/results/records, so that the tables can go on from there."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from adanpc.lab.sweep.records import FILE, Records
from adanpc.lab.tables import TABLES
from adanpc.lab.tables.scale import SCALES, Scale

KEPT = sorted((Path(__file__).parents[3] / "benchmarks" / "results" / "records").glob("*.jsonl"))


def entries_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scale_of(command: str) -> Scale:
    """The scale of an ``adanpc table`` command, with all rows."""
    words = shlex.split(command)
    options = dict(pairwise(words))
    own: dict[str, Any] = {"encoder": options.get("--encoder", "")}
    for name in ("steps", "images", "seeds"):
        if f"--{name}" in options:
            own[name] = int(options[f"--{name}"])
    return replace(SCALES[options["--scale"]], **own)


def test_records_are_kept() -> None:
    assert KEPT


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_every_kept_record_is_used_by_its_table(path: Path, tmp_path: Path) -> None:
    """A record counts only if its task is still in the plan: after other defaults it is to be made again."""
    (tmp_path / FILE).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    records = Records(tmp_path)
    kept = entries_of(path)
    assert records.damaged == 0
    assert len(records.entries) == len(kept)
    for command in {entry["environment"]["command"] for entry in kept}:
        tasks = TABLES[path.stem].plan(scale_of(command))
        planned = {task.id for task in tasks}
        for task in tasks:
            first = task.prerequisite()
            if first is not None:
                planned.add(first.id)
        made = {entry["id"] for entry in kept if entry["environment"]["command"] == command}
        assert made <= planned


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_records_name_no_folder_outside_of_the_repository(path: Path) -> None:
    for entry in entries_of(path):
        words = shlex.split(entry["environment"]["command"])
        assert not [word for word in words if word.startswith(("/", "~", ".."))]
