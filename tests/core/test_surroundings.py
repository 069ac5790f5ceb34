"""What torch is set to, and how tensors lie in memory, changes no answer and breaks no bank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from adanpc.core import AdaNPC, Append, MemoryBank, Origin, Restore, Veto, everyone
from adanpc.errors import AdaNPCError, ChangeError, LabelError
from adanpc.index import scan as scans
from adanpc.index import unit
from adanpc.index.blocks import Blocks

STORAGES = ("float32", "float16", "int8")


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "float64 by default": float64_by_default,
    "deterministic": deterministic,
}


def close_rows(dim: int = 64, rows: int = 900) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and queries that differ little, so that low precision would show."""
    generator = torch.Generator().manual_seed(0)
    center = torch.randn(dim, generator=generator, dtype=torch.float32)
    spread = 0.05 * torch.randn(rows + 20, dim, generator=generator, dtype=torch.float32)
    return center + spread[:rows], torch.arange(rows) % 3, center + spread[rows:]


@pytest.mark.no_cover
@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("engine", ["numkong", "torch"])
def test_answers_do_not_depend_on_the_surroundings(
    name: str, storage: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "torch":
        monkeypatch.setattr(scans, "numkong", None)
        monkeypatch.setattr(scans, "CACHED", 0)
    rows, labels, stream = close_rows()

    def run(cut: int) -> tuple[str, list[list[float]]]:
        model = AdaNPC(MemoryBank(64, 3, storage=storage, soft=True), k=9, admission=everyone)
        model.learn(rows, labels)
        probs = [model.step(part).probs for part in stream.split(cut)]
        return model.bank.digest(), torch.cat(probs).tolist()

    expected = run(20)
    with SURROUNDINGS[name]():
        for cut in (1, 5, 20):
            assert run(cut) == expected


def test_a_bank_built_in_inference_mode_lives_on_outside() -> None:
    with torch.inference_mode():
        model = AdaNPC(MemoryBank(4, 2), k=1, admission=everyone)
        model.learn(torch.eye(4), torch.tensor([0, 1, 0, 1]))
    model.step(torch.rand(70, 4))
    model.apply(Veto((0,)))
    assert model.bank.table("id")["id"].tolist() == list(range(74))


@pytest.mark.parametrize("storage", STORAGES)
def test_the_layout_of_a_batch_does_not_matter(storage: str) -> None:
    bank = MemoryBank(8, 2, storage=storage)
    bank.apply(Append(torch.randn(8, 70).T, torch.arange(70) % 2))
    for batch in (1, 3, 20):
        queries = torch.randn(8, batch)
        assert torch.equal(bank.search(queries.T, 5).ids, bank.search(queries.T.contiguous(), 5).ids)
        assert torch.equal(bank.search(queries.T, 5).ids, bank.search(queries.T.requires_grad_(), 5).ids)


def test_long_vectors_have_a_length_of_their_own() -> None:
    torch.manual_seed(0)
    features = torch.randn(32, 10_000)
    assert torch.equal(unit(features), torch.cat([unit(row[None]) for row in features]))


def test_torchs_newer_precision_switch_is_taken_at_its_coarsest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> str:
        raise RuntimeError("PyTorch is checking the matmul precision without a specific backend name")

    rows, labels, stream = close_rows()
    bank = MemoryBank(64, 3)
    bank.apply(Append(rows, labels))
    expected = bank.search(stream, 9).ids
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    assert torch.equal(bank.search(stream, 9).ids, expected)


def test_running_out_of_memory_leaves_the_bank_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = MemoryBank(8, 2, capacity=60)
    bank.apply(Append(torch.rand(63, 8), torch.zeros(63, dtype=torch.int64)))
    bank.apply(Append(torch.rand(60, 8), torch.zeros(60, dtype=torch.int64), Origin.ADMITTED))
    before, room = bank.digest(), Blocks._memory

    def full(*_: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(Blocks, "_memory", full)
    change = Append(torch.rand(9, 8), torch.zeros(9, dtype=torch.int64), Origin.ADMITTED)
    with pytest.raises(MemoryError):
        bank.apply(change)
    monkeypatch.setattr(Blocks, "_memory", room)
    assert bank.digest() == before
    bank.apply(change)
    assert len(bank) == 63 + 60


def test_equal_banks_have_equal_digests_whatever_numbers_they_were_built_with() -> None:
    sizes: Any = {"dim": np.int64(2), "classes": np.int32(3), "capacity": np.int64(5), "soft": 1}
    plain, numpy = MemoryBank(2, 3, capacity=5, soft=True), MemoryBank(**sizes)
    for bank, tiny in ((plain, 1e-10), (numpy, -1e-10)):  # both are stored as 0
        bank.apply(Append(torch.tensor([[1.0, tiny]]), torch.tensor([1])))
    plain.apply(Veto((0,), "me"))
    row: Any = np.int64(0)
    numpy.apply(Veto((row,), "me"))
    assert plain.digest() == numpy.digest()
    rows: Any = torch.tensor([0])
    numpy.apply(Restore(rows))
    assert numpy.vetoes == {}
    row = 0.5
    with pytest.raises(ChangeError, match="ids must be whole numbers"):
        Veto((row,))


@pytest.mark.parametrize("ids", [3, "3", "", b"3", {3: "x"}, None, torch.tensor(3)])
def test_ids_are_given_in_a_sequence(ids: Any) -> None:
    with pytest.raises(ChangeError, match=r"ids must be a sequence of row ids such as \[3, 5\], got "):
        Veto(ids)


def test_columns_do_not_keep_gradients() -> None:
    bank = MemoryBank(2, 2, soft=True)
    probs = torch.tensor([[0.5, 0.5]], requires_grad=True)
    bank.apply(Append(torch.ones(1, 2), torch.tensor([0]), soft=probs, confidence=torch.ones(1, requires_grad=True)))
    assert bank.digest() == pickle.loads(pickle.dumps(bank)).digest()


@pytest.mark.parametrize("soft", [[[9.0, -8.0]], [[0.2, 0.2]]])
def test_soft_labels_are_probabilities(soft: list[list[float]]) -> None:
    with pytest.raises(LabelError, match="probabilities that sum to 1"):
        MemoryBank(2, 2, soft=True).apply(Append(torch.ones(1, 2), torch.tensor([0]), soft=torch.tensor(soft)))


@pytest.mark.parametrize("options", [{"domain": 1.7}, {"keys": torch.tensor([1.7])}, {"confidence": float("nan")}])
def test_single_values_are_checked_as_columns_are(options: dict[str, Any]) -> None:
    with pytest.raises(LabelError, match="numbers"):
        MemoryBank(2, 2).apply(Append(torch.ones(1, 2), torch.tensor([0]), **options))


def test_an_exclusion_may_be_a_list() -> None:
    bank = MemoryBank(2, 2)
    bank.apply(Append(torch.eye(2), torch.tensor([0, 1])))
    assert bank.search(torch.eye(2), 1, exclude=[[0], [1]]).ids.tolist() == [[1], [0]]  # type: ignore[arg-type]


@pytest.mark.parametrize("exclude", [torch.tensor([0, 1]), torch.tensor([[0]]), torch.tensor([[0.5], [1.0]])])
def test_an_exclusion_must_fit_the_queries(exclude: torch.Tensor) -> None:
    bank = MemoryBank(2, 2)
    bank.apply(Append(torch.eye(2), torch.tensor([0, 1])))
    with pytest.raises(AdaNPCError, match=r"exclude must be whole numbers of shape \(2, E\)"):
        bank.search(torch.eye(2), 1, exclude=exclude)


def test_hidden_neighbors_have_no_soft_label_either() -> None:
    def run(cut: int) -> torch.Tensor:
        bank = MemoryBank(2, 2, soft=True, capacity=1)
        bank.apply(Append(torch.eye(2), torch.tensor([0, 1])))
        bank.apply(Append(torch.tensor([[1.0, 1.0]]), torch.tensor([1]), Origin.ADMITTED))
        model = AdaNPC(bank, k=4, admission=everyone)
        found = [
            model.step(part).neighbors.soft for part in torch.tensor([[1.0, 0.2], [0.9, 0.3], [0.8, 0.1]]).split(cut)
        ]
        return torch.cat([soft for soft in found if soft is not None])

    assert torch.equal(run(1), run(3))


def test_centering_of_enormous_features_is_finite() -> None:
    model = AdaNPC(MemoryBank(2, 2), k=1, centering="source")
    model.learn(torch.tensor([[-3e38, 1.0], [-3e38, -1.0]]), torch.tensor([0, 1]))
    assert model.predict(torch.tensor([[3e38, 1.0]])).probs.isfinite().all()
