"""The frozen vote as an ONNX model: onnxruntime answers as the bank does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from presets import paper
from sklearn.datasets import load_digits

from adanpc.core import AdaNPC, Append, MemoryBank, Origin, Veto, everyone
from adanpc.core.vote import RULES
from adanpc.errors import AdaNPCError, EmptyBankError, UnavailableError
from adanpc.store import BankFileError, load, onnx_file, write_onnx

runtime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
DIM, CLASSES = 16, 3


def features(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.eye(DIM)[which] + 0.4 * torch.randn(count, DIM, generator=generator)


def adapted(bank: MemoryBank, **options: Any) -> AdaNPC:
    """A classifier that has learned and adapted, with equal rows and vetoed ones."""
    classifier = AdaNPC(bank, **options)
    rows = features(1, 60)
    rows[10:14] = rows[0]
    classifier.learn(rows, torch.arange(60) % CLASSES, domain=torch.arange(60) % 2)
    classifier.step(features(2, 30))
    classifier.apply(Veto((0, 3)))
    return classifier


def answers(classifier: AdaNPC, path: Path, queries: torch.Tensor) -> list[torch.Tensor]:
    write_onnx(classifier, path)
    onnx.checker.check_model(str(path))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = session.run(["probs", "labels", "neighbors"], {"features": queries.numpy()})
    return [torch.from_numpy(each) for each in found]


@pytest.mark.parametrize("pools", [{"k": 40}, {"k_source": 7, "k_target": 300}])
@pytest.mark.parametrize("centering", ["none", "source", "stream"])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_runtime_answers_as_the_bank_does(
    tmp_path: Path, rule: str, soft: bool, centering: str, pools: dict[str, int]
) -> None:
    bank = MemoryBank(DIM, CLASSES, soft=soft, storage="int8")
    classifier = adapted(bank, rule=rule, centering=centering, admission=everyone, **pools)
    queries = torch.cat([features(9, 40), features(1, 5), 1e6 * features(8, 2)])
    probs, labels, neighbors = answers(classifier, tmp_path / "vote.onnx", queries)
    expected = classifier.predict(queries)
    assert torch.equal(labels, expected.labels)
    torch.testing.assert_close(probs, expected.probs, rtol=0, atol=1e-6)
    for ours, theirs in zip(neighbors.tolist(), expected.neighbors.ids.tolist(), strict=True):
        assert sorted(ours) == sorted(row for row in theirs if row >= 0)


@pytest.mark.parametrize("transform", [True, False])
def test_the_preset_safe_is_exported_as_it_would_answer_without_its_stream(tmp_path: Path, transform: bool) -> None:
    bank = MemoryBank(DIM, ["ant", "bee", "cat"], soft=True)
    classifier = adapted(bank, preset="safe", transform=transform)
    queries = features(9, 40)
    probs, labels, _ = answers(classifier, tmp_path / "vote.onnx", queries)
    expected = classifier.predict(queries).frozen
    assert expected is not None
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-6)
    assert torch.equal(labels, expected.argmax(1))
    (classes,) = onnx.load(str(tmp_path / "vote.onnx")).metadata_props
    assert (classes.key, classes.value) == ("classes", "ant\nbee\ncat")


def test_a_transform_without_the_square_root_is_exported_without_it(tmp_path: Path) -> None:
    """Pixels of digits, which the root does not suit."""
    digits = load_digits()
    pixels = torch.tensor(digits.data[:650]).float()
    classifier = AdaNPC(MemoryBank(64, 10, soft=True), preset="safe")
    classifier.learn(pixels[:600], torch.tensor(digits.target[:600]))
    assert float(classifier.bank.contents.transform().power) == 1
    probs, _, _ = answers(classifier, tmp_path / "vote.onnx", pixels[600:])
    expected = classifier.predict(pixels[600:]).frozen
    assert expected is not None
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-6)


def test_a_query_that_centering_moves_to_the_origin_keeps_its_direction(tmp_path: Path) -> None:
    classifier = AdaNPC(MemoryBank(2, 2), k=1, centering="source")
    classifier.learn(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    classifier.apply(Append(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), Origin.EXPERT))
    queries = torch.tensor([[2.0, 0.0], [0.3, 0.4]])
    probs, _, _ = answers(classifier, tmp_path / "vote.onnx", queries)
    assert torch.equal(probs, classifier.predict(queries).probs)


def test_a_bank_of_format_1_whose_means_are_of_plain_features(tmp_path: Path) -> None:
    classifier = load(Path(__file__).parent / "golden" / "format-1-int8.safetensors")
    assert not paper(classifier).centering.unit_features
    queries = features(5, 20)[:, : classifier.bank.dim]
    probs, _, _ = answers(classifier, tmp_path / "vote.onnx", queries)
    torch.testing.assert_close(probs, classifier.predict(queries).probs, rtol=0, atol=1e-6)


def test_a_stream_that_has_not_begun(tmp_path: Path) -> None:
    classifier = AdaNPC(MemoryBank(DIM, CLASSES), centering="stream")
    classifier.learn(features(1, 30), torch.arange(30) % CLASSES)
    probs, _, _ = answers(classifier, tmp_path / "vote.onnx", features(2, 9))
    torch.testing.assert_close(probs, classifier.predict(features(2, 9)).probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("preset", ["paper", "safe"])
def test_a_bank_without_voters(tmp_path: Path, preset: str) -> None:
    with pytest.raises(EmptyBankError, match="no row of the bank may vote"):
        write_onnx(AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset=preset), tmp_path / "vote.onnx")
    assert not list(tmp_path.iterdir())


def test_a_rule_without_a_graph_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="the vote rule 'newest' has no ONNX graph yet"):
        onnx_file._vote(onnx_file.Graph(), "newest", "similarity", "members", 0.1, 2, 15)


def test_what_is_missing_or_too_large_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = adapted(MemoryBank(DIM, CLASSES), k=3)
    monkeypatch.setattr(onnx_file, "MOST_BYTES", 100)
    with pytest.raises(BankFileError, match="was not saved: an ONNX file holds less than 2 GiB, and the rows have"):
        write_onnx(classifier, tmp_path / "vote.onnx")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnx.helper", None)
    with pytest.raises(UnavailableError, match="a model in ONNX needs onnx, which is not installed: pip install onnx"):
        write_onnx(classifier, tmp_path / "vote.onnx")
