"""What a bank holds, in other libraries: the same rows, the same neighbors."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from adanpc.core import AdaNPC, Append, MemoryBank, Origin, Veto, everyone
from adanpc.errors import AdaNPCError, UnavailableError


def filled() -> AdaNPC:
    """Five source rows, of which one is vetoed, and two that were admitted."""
    torch.manual_seed(0)
    classifier = AdaNPC(MemoryBank(4, ["cat", "dog"]), k=2, admission=everyone)
    classifier.learn(torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1]), domain=3, keys=torch.arange(10, 15))
    classifier.step(torch.randn(2, 4), keys=torch.tensor([7, 8]))
    classifier.apply(Veto((1,)))
    return classifier


def test_a_table_has_a_line_for_each_row() -> None:
    bank = filled().bank
    table = bank.to_pandas()
    assert table.index.tolist() == list(range(7))
    assert table["key"].tolist() == [10, 11, 12, 13, 14, 7, 8]
    assert table["origin"].tolist() == ["source"] * 5 + ["admitted"] * 2
    assert table["vetoed"].tolist() == [False, True, False, False, False, False, False]
    assert [["cat", "dog"][label] for label in table["label"]] == table["class"].tolist()
    assert "class" not in MemoryBank(4, 2).to_pandas()


def test_a_graph_has_the_neighbors_of_a_search() -> None:
    bank = filled().bank
    graph = bank.knn_graph(3)
    assert graph.shape == (7, 7)
    ids = torch.arange(7)
    expected = np.zeros((7, 7))
    near = bank.search(bank.rows(ids), 3, exclude=ids[:, None])
    for row in range(7):
        expected[row, near.ids[row]] = near.similarity[row]
    np.testing.assert_array_equal(graph.toarray(), expected)
    assert not graph.toarray()[:, 1].any()  # a vetoed row is nobody's neighbor


def test_a_graph_of_few_rows_or_none() -> None:
    assert MemoryBank(4, 2).knn_graph().shape == (0, 0)
    classifier = AdaNPC(MemoryBank(4, 2))
    classifier.learn(torch.randn(2, 4), torch.tensor([0, 1]), origin=Origin.EXPERT)
    assert classifier.bank.knn_graph(10).nnz == 2


def test_a_k_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="k must be at least 1, got 0"):
        MemoryBank(4, 2).knn_graph(0)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnavailableError, match="needs pandas, which is not installed: pip install pandas"):
        MemoryBank(4, 2).to_pandas()


def test_answers_are_shown_in_one_line() -> None:
    classifier = filled()
    answer = classifier.predict(torch.randn(9, 4))
    contents = classifier.bank.contents
    append = Append(torch.randn(9, 4), torch.zeros(9), who="me", when=1.5)
    rollback = classifier.rollback(contents)
    safe = AdaNPC(MemoryBank(4, 2, soft=True), preset="safe")
    safe.learn(torch.randn(30, 4), torch.arange(30) % 2)
    transform = safe.bank.contents.statistics.transform
    values = (answer, answer.neighbors, classifier.bank, contents, contents.index, append, rollback, transform)
    for shown in map(repr, values):
        assert "\n" not in shown
        assert len(shown) < 250
    assert repr(append) == "<Append of features (9, 4), origin <Origin.SOURCE: 0>, who='me', when=1.5>"
    assert repr(contents).startswith("<Contents at position 3: 7 rows, 2 admitted, 1 vetoed>")
    assert repr(answer).startswith("<Prediction of 9 queries, 2 classes: labels [")
    assert repr(classifier.predict(torch.randn(1, 4))).startswith("<Prediction of 1 query, 2 classes: labels [")
    assert repr(classifier.predict(torch.zeros(0, 4))) == "<Prediction of 0 queries, 2 classes>"
