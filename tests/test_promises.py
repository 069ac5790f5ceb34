"""What the project promises of itself: names, imports, examples that run, and the defects it must not repeat."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import adanpc
from adanpc import AdaNPC, Admission, Append, MemoryBank, Origin, everyone
from adanpc.core import Prediction, vote
from adanpc.index import ExactIndex
from adanpc.index import blocks as memory

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "adanpc"


def test_no_module_is_named_for_nothing() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "util", "misc", "common", "helpers"}


def test_every_public_name_is_used_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in adanpc.__all__:
        assert hasattr(adanpc, name)
        assert re.search(rf"\b{name}\b", tests), name


def test_the_readme_names_the_two_commands_and_its_code_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    ten_lines = [line for line in blocks[1].splitlines() if line]
    assert len(ten_lines) <= 10
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    promised = re.search(r"# prints ([\d.]+)% before, ([\d.]+)% after", blocks[1])
    printed = re.search(r"([\d.]+)% before, ([\d.]+)% after", done.stdout)
    assert promised is not None
    assert printed is not None
    # To within a point: another machine rounds differently while the network is trained.
    for number in (1, 2):
        assert float(printed[number]) == pytest.approx(float(promised[number]), abs=1)


LONGER = {"own_index": 110}  # the protocol of an index has fifteen members


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run_and_are_short(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(path.read_text().splitlines()) <= LONGER.get(path.stem, 60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")  # in this process: another one would import torch again
    assert capsys.readouterr().out.strip()


def functions_of_tests() -> set[str]:
    """The names of all functions in the tests and in the shipped contracts."""
    files = [*(ROOT / "tests").rglob("*.py"), *(PACKAGE / "testing").glob("*.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_promise_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 50
    assert named <= functions_of_tests()
    for path in re.findall(r"`(tests/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path


def test_every_defect_is_covered() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", (ROOT / "docs" / "defects.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 29))
    known = functions_of_tests()
    for number, tests in rows:
        for named in re.findall(r"`(\w+)`", tests):
            assert named in known, f"defect {number}: {named}"


# Defects that no other file tests -----------------------------------------------------------------------------------


def test_confidence_is_not_capped_by_a_second_softmax() -> None:
    bank = MemoryBank(2, 10)
    bank.apply(Append(torch.tensor([[1.0, 0.0]] * 5), torch.full((5,), 3)))
    answer = AdaNPC(bank, k=5).predict(torch.tensor([[1.0, 0.0]]))
    assert float(answer.confidence) == 1.0  # the published code cannot exceed e / (e + 9) = 0.23 here


def test_appending_copies_no_full_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK_BYTES", 1 << 20)
    bank = MemoryBank(64, 2)
    bank.apply(Append(torch.rand(12_000, 64), torch.zeros(12_000, dtype=torch.int64)))
    index = bank.contents.index
    assert isinstance(index, ExactIndex)
    blocks = {part.data_ptr() for part in index.blocks.columns["row"]}
    assert len(blocks) > 2
    bank.apply(Append(torch.rand(1, 64), torch.tensor([0]), Origin.ADMITTED))
    kept = blocks & {part.data_ptr() for part in index.blocks.columns["row"]}
    assert kept == blocks


def test_no_device_is_hard_coded() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"\.cuda\(|['\"]cuda", path.read_text()), path
    # The meta device has no data, only places: a tensor made elsewhere would be noticed.
    features = torch.rand(4, 3, device="meta")
    near = adanpc.core.Neighbors(
        torch.zeros(4, 2, dtype=torch.int64, device="meta"),
        torch.rand(4, 2, dtype=torch.float64, device="meta"),
        torch.zeros(4, 2, dtype=torch.int64, device="meta"),
    )
    assert vote(near, 3)[0].device == adanpc.index.unit(features).device == torch.device("meta")


def test_a_query_joins_once() -> None:
    model = AdaNPC(MemoryBank(2, 2), k=1, admission=everyone)
    model.learn(torch.eye(2), torch.tensor([0, 1]))
    model.step(torch.rand(7, 2))
    assert len(model.bank) == 9


def test_step_takes_no_labels() -> None:
    for verb in (AdaNPC.step, AdaNPC.propose, AdaNPC.predict):
        assert not {"label", "labels", "target", "targets", "y"} & set(verb.__annotations__)


def test_every_option_matters() -> None:
    torch.manual_seed(0)
    source, labels = torch.randn(60, 4) + 0.5, torch.arange(60) % 3
    domain, stream = torch.arange(60) % 2, torch.randn(50, 4) + 1.0

    def outcome(bank: dict[str, Any], model: dict[str, Any]) -> tuple[str, list[float]]:
        made = AdaNPC(MemoryBank(4, 3, **bank), **{"admission": everyone, **model})
        made.learn(source, labels, domain=domain)
        answer: Prediction = made.step(stream)
        return made.bank.digest(), answer.probs.flatten().tolist()

    plain = outcome({"capacity": 9}, {})
    seen = [plain]
    for bank in (
        {"evict": "balanced"},
        {"evict": "reservoir"},
        {"storage": "int8"},
        {"storage": "float16"},
        {"soft": True},
    ):
        seen.append(outcome({"capacity": 9, **bank}, {}))
    seen.append(outcome({}, {}))
    for model in (
        {"k": 3},
        {"k_source": 3, "k_target": 7},
        {"rule": "paper"},
        {"rule": "uniform"},
        {"rule": "rank"},
        {"rule": "classwise"},
        {"rule": "published"},
        {"temperature": 0.5},
        {"admission": Admission(min_confidence=0.5)},
        {"centering": "source"},
        {"centering": "stream"},
        {"centering": "stream", "prior": 3},
    ):
        seen.append(outcome({"capacity": 9}, model))
    for one, other in pairwise(sorted(seen)):
        assert one[1] != other[1]
