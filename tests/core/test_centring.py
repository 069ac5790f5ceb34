"""Centring: what is subtracted from whom."""

from __future__ import annotations

import pytest
import torch

from adanpc.core import AdaNPC, MemoryBank, nobody
from adanpc.core.centring import Centring
from adanpc.errors import LabelError

SOURCE = torch.tensor([[2.0, 0.0], [4.0, 2.0], [10.0, 10.0], [14.0, 12.0]])
DOMAIN = torch.tensor([0, 0, 1, 1])


def test_none_leaves_features_alone() -> None:
    centring = Centring(2)
    assert centring.source(SOURCE, DOMAIN) == (SOURCE, None)
    assert centring.queries(SOURCE, sequence=True) == (SOURCE, None)


def test_source_subtracts_one_mean_from_all() -> None:
    centring = Centring(2, "source")
    centred, centring.mean = centring.source(SOURCE, DOMAIN)
    assert centred.tolist() == (SOURCE - torch.tensor([7.5, 6.0])).tolist()
    queries, stream = centring.queries(torch.tensor([[8.5, 6.0]]), sequence=True)
    assert queries.tolist() == [[1.0, 0.0]]
    assert stream is None
    later = torch.tensor([[100.0, 100.0]])
    assert centring.source(later, DOMAIN[:1])[0].tolist() == [[92.5, 94.0]]  # the first mean stays


def test_stream_subtracts_each_domains_mean_and_a_running_mean() -> None:
    centring = Centring(2, "stream", prior=2)
    expected = SOURCE - torch.tensor([[3.0, 1.0], [3.0, 1.0], [12.0, 11.0], [12.0, 11.0]])
    centred, centring.mean = centring.source(SOURCE, DOMAIN)
    assert centred.tolist() == expected.tolist()
    stream = torch.tensor([[0.0, 0.0], [6.0, 3.0]])
    queries, after = centring.queries(stream, sequence=True)
    first = (2 * torch.tensor([7.5, 6.0]) + stream[0]) / 3
    second = (2 * torch.tensor([7.5, 6.0]) + stream[0] + stream[1]) / 4
    torch.testing.assert_close(queries, torch.stack([-first, stream[1] - second]))
    assert after is not None
    assert after[0].tolist() == [6.0, 3.0]
    assert after[1] == 2
    alone, _ = centring.queries(stream, sequence=False)
    torch.testing.assert_close(alone[1], stream[1] - (2 * torch.tensor([7.5, 6.0]) + stream[1]) / 3)


def test_a_feature_equal_to_its_mean_keeps_its_direction() -> None:
    centring = Centring(2, "source")
    assert centring.source(torch.tensor([[3.0, 4.0]]), DOMAIN[:1])[0].tolist() == [[3.0, 4.0]]


def test_a_refused_lesson_leaves_the_mean_alone() -> None:
    made = AdaNPC(MemoryBank(2, 2), centring="source")
    with pytest.raises(LabelError):
        made.learn(SOURCE, torch.tensor([0, 1, 0, 5]))
    assert made.centring.mean is None


def test_the_stream_is_counted_even_when_nobody_joins() -> None:
    made = AdaNPC(MemoryBank(2, 2), k=1, admission=nobody, centring="stream")
    made.learn(SOURCE, torch.tensor([0, 1, 0, 1]), domain=DOMAIN)
    made.step(SOURCE[:3])
    assert made.centring.count == 3
    assert made.centring.total.tolist() == SOURCE[:3].double().sum(0).tolist()


def test_centring_undoes_a_shift_of_the_whole_domain() -> None:
    torch.manual_seed(0)
    labels = torch.arange(200) % 2
    features = torch.randn(200, 8) + 3 * torch.nn.functional.one_hot(labels * 3, 8)
    shifted, answers = features + torch.tensor([5.0] * 8), {}
    for mode in ("none", "stream"):
        made = AdaNPC(MemoryBank(8, 2), k=9, admission=nobody, centring=mode, prior=4)
        made.learn(features, labels)
        answers[mode] = float((made.step(shifted).labels == labels).float().mean())
    assert answers["stream"] > answers["none"] + 0.1
