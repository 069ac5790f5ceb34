"""Centering: what is subtracted from whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adanpc.core import AdaNPC, Append, Centering, MemoryBank, Origin, PaperSettings, nobody
from adanpc.core.centering import Statistics
from adanpc.errors import AdaNPCError, LabelError
from adanpc.index import unit

SOURCE = torch.tensor([[2.0, 0.0], [4.0, 2.0], [10.0, 10.0], [14.0, 12.0]])
DOMAIN = torch.tensor([0, 0, 1, 1])
MEAN = unit(SOURCE).double().mean(0)


def prepared(centering: Centering, features: Tensor, domain: Tensor, statistics: Statistics) -> Append:
    change = Append(features, torch.zeros(len(features), dtype=torch.int64), domain=domain)
    return centering.prepared(change, features, statistics)


def test_none_leaves_features_alone() -> None:
    change = prepared(Centering(), SOURCE, DOMAIN, Statistics())
    assert change.features is SOURCE
    assert not change.centered
    assert Centering().queries(SOURCE, Statistics(), sequence=True) == (SOURCE, None)


def test_source_subtracts_one_mean_from_all() -> None:
    centering = Centering("source")
    change = prepared(centering, SOURCE, DOMAIN, Statistics())
    torch.testing.assert_close(change.features, (unit(SOURCE) - MEAN).float())
    statistics = Statistics().after(change)
    queries, observed = centering.queries(torch.tensor([[8.5, 6.0]]), statistics, sequence=True)
    torch.testing.assert_close(queries, (unit(torch.tensor([[8.5, 6.0]])) - MEAN).float())
    assert observed is None
    later = torch.tensor([[100.0, 0.0]])
    again = prepared(centering, later, DOMAIN[:1], statistics)
    torch.testing.assert_close(again.features, (unit(later) - MEAN).float())  # the first mean stays


def test_stream_subtracts_each_domains_mean_and_a_running_mean() -> None:
    centering = Centering("stream", prior=2)
    change = prepared(centering, SOURCE, DOMAIN, Statistics())
    rows = unit(SOURCE).double()
    expected = torch.cat([rows[:2] - rows[:2].mean(0), rows[2:] - rows[2:].mean(0)])
    torch.testing.assert_close(change.features, expected.float())
    statistics = Statistics().after(change)
    stream = torch.tensor([[0.0, 3.0], [6.0, 3.0]])
    queries, observed = centering.queries(stream, statistics, sequence=True)
    first, second = unit(stream).double()
    torch.testing.assert_close(queries[0], (first - (2 * MEAN + first) / 3).float())
    torch.testing.assert_close(queries[1], (second - (2 * MEAN + first + second) / 4).float())
    assert observed is not None
    assert observed.total.tolist() == (first + second).tolist()
    assert observed.count == 2
    alone, _ = centering.queries(stream, statistics, sequence=False)
    torch.testing.assert_close(alone[1], (second - (2 * MEAN + second) / 3).float())


def test_a_feature_equal_to_its_mean_keeps_its_direction() -> None:
    change = prepared(Centering("source"), torch.tensor([[3.0, 4.0]]), DOMAIN[:1], Statistics())
    torch.testing.assert_close(change.features, torch.tensor([[0.6, 0.8]]))


def test_a_refused_lesson_leaves_the_mean_alone() -> None:
    made = AdaNPC(MemoryBank(2, 2), centering="source")
    with pytest.raises(LabelError):
        made.learn(SOURCE, torch.tensor([0, 1, 0, 5]))
    assert made.bank.contents.statistics.source_mean is None
    assert made.position == 0


def test_the_stream_is_counted_even_when_nobody_joins() -> None:
    made = AdaNPC(MemoryBank(2, 2), k=1, admission=nobody, centering="stream")
    made.learn(SOURCE, torch.tensor([0, 1, 0, 1]), domain=DOMAIN)
    made.step(SOURCE[:3])
    statistics = made.bank.contents.statistics
    assert statistics.stream_count == 3
    assert statistics.stream_total is not None
    assert statistics.stream_total.tolist() == unit(SOURCE[:3]).double().sum(0).tolist()
    assert made.position == 2


def test_an_experts_row_is_centered_as_a_query_that_came_next() -> None:
    made = AdaNPC(MemoryBank(2, 2), k=1, admission=nobody, centering="stream", prior=2)
    made.learn(SOURCE, torch.tensor([0, 1, 0, 1]), domain=DOMAIN)
    made.step(SOURCE[1:])
    query = torch.tensor([[1.0, 5.0]])
    made.learn(query, torch.tensor([1]), origin=Origin.EXPERT, who="Ada")
    answer = made.predict(query)
    assert answer.neighbors.ids.tolist() == [[4]]
    assert float(answer.neighbors.similarity) == pytest.approx(1)


def test_centering_undoes_a_shift_of_the_whole_domain() -> None:
    torch.manual_seed(0)
    labels = torch.arange(200) % 2
    features = torch.randn(200, 8) + 3 * torch.nn.functional.one_hot(labels * 3, 8)
    shifted, answers = features + torch.tensor([5.0] * 8), {}
    for mode in ("none", "stream"):
        made = AdaNPC(MemoryBank(8, 2), k=9, admission=nobody, centering=mode, prior=4)
        made.learn(features, labels)
        answers[mode] = float((made.step(shifted).labels == labels).float().mean())
    assert answers["stream"] > answers["none"] + 0.1


def test_one_enormous_feature_does_not_ruin_the_rest() -> None:
    torch.manual_seed(0)
    labels = torch.arange(300) % 3
    features = torch.randn(300, 8) + 4 * torch.nn.functional.one_hot(labels * 2, 8)
    accuracy = []
    for attack in (1.0, 1e12):
        made = AdaNPC(MemoryBank(8, 3), k=9, admission=nobody, centering="stream")
        made.learn(features, labels)
        made.step(features[:1] * attack)
        accuracy.append(float((made.step(features + 1).labels == labels).float().mean()))
    assert accuracy[0] == accuracy[1]


def test_domains_that_do_not_fit_are_refused() -> None:
    made = AdaNPC(MemoryBank(2, 2), centering="stream")
    with pytest.raises(LabelError, match=r"domain must have shape \(4,\), one for each row, got \(3,\)"):
        made.learn(SOURCE, torch.tensor([0, 1, 0, 1]), domain=DOMAIN[:3])


def test_a_centering_is_a_value() -> None:
    mode: Any = "stream"
    with pytest.raises(AdaNPCError, match="centering must be a Centering such as"):
        PaperSettings(centering=mode)
