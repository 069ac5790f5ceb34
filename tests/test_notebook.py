"""The notebook: its cells run, one after another, and every method answers or says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adanpc.lab.adapt import ADAPTERS

PATH = Path(__file__).parent.parent / "examples" / "all_methods.ipynb"


@pytest.mark.no_cover
def test_all_methods_run_on_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(PATH.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code[1].splitlines()) <= 21  # what is needed beside the model
    namespace: dict[str, Any] = {}
    for cell in code:
        exec(compile(cell, PATH.name, "exec"), namespace)
    shown = capsys.readouterr().out
    lines = [line.replace(":", " ").split()[0] for line in shown.splitlines()]
    assert sorted(lines) == sorted(ADAPTERS)
    assert set(ADAPTERS) - set(namespace["accuracy"]) == {"ttt", "ttt-online"}
