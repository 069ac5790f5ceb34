"""Centering: what is subtracted from whom."""

from __future__ import annotations

import pytest
import torch

from adanpc.core import AdaNPC, MemoryBank, nobody
from adanpc.core.centering import Centering
from adanpc.errors import LabelError

SOURCE = torch.tensor([[2.0, 0.0], [4.0, 2.0], [10.0, 10.0], [14.0, 12.0]])
DOMAIN = torch.tensor([0, 0, 1, 1])


def test_none_leaves_features_alone() -> None:
    centering = Centering(2)
    assert centering.source(SOURCE, DOMAIN) == (SOURCE, None)
    assert centering.queries(SOURCE, sequence=True) == (SOURCE, None)


def test_source_subtracts_one_mean_from_all() -> None:
    centering = Centering(2, "source")
    centered, centering.mean = centering.source(SOURCE, DOMAIN)
    assert centered.tolist() == (SOURCE - torch.tensor([7.5, 6.0])).tolist()
    queries, stream = centering.queries(torch.tensor([[8.5, 6.0]]), sequence=True)
    assert queries.tolist() == [[1.0, 0.0]]
    assert stream is None
    later = torch.tensor([[100.0, 100.0]])
    assert centering.source(later, DOMAIN[:1])[0].tolist() == [[92.5, 94.0]]  # the first mean stays


def test_stream_subtracts_each_domains_mean_and_a_running_mean() -> None:
    centering = Centering(2, "stream", prior=2)
    expected = SOURCE - torch.tensor([[3.0, 1.0], [3.0, 1.0], [12.0, 11.0], [12.0, 11.0]])
    centered, centering.mean = centering.source(SOURCE, DOMAIN)
    assert centered.tolist() == expected.tolist()
    stream = torch.tensor([[0.0, 0.0], [6.0, 3.0]])
    queries, after = centering.queries(stream, sequence=True)
    first = (2 * torch.tensor([7.5, 6.0]) + stream[0]) / 3
    second = (2 * torch.tensor([7.5, 6.0]) + stream[0] + stream[1]) / 4
    torch.testing.assert_close(queries, torch.stack([-first, stream[1] - second]))
    assert after is not None
    assert after[0].tolist() == [6.0, 3.0]
    assert after[1] == 2
    alone, _ = centering.queries(stream, sequence=False)
    torch.testing.assert_close(alone[1], stream[1] - (2 * torch.tensor([7.5, 6.0]) + stream[1]) / 3)


def test_a_feature_equal_to_its_mean_keeps_its_direction() -> None:
    centering = Centering(2, "source")
    assert centering.source(torch.tensor([[3.0, 4.0]]), DOMAIN[:1])[0].tolist() == [[3.0, 4.0]]


def test_a_refused_lesson_leaves_the_mean_alone() -> None:
    made = AdaNPC(MemoryBank(2, 2), centering="source")
    with pytest.raises(LabelError):
        made.learn(SOURCE, torch.tensor([0, 1, 0, 5]))
    assert made.centering.mean is None


def test_the_stream_is_counted_even_when_nobody_joins() -> None:
    made = AdaNPC(MemoryBank(2, 2), k=1, admission=nobody, centering="stream")
    made.learn(SOURCE, torch.tensor([0, 1, 0, 1]), domain=DOMAIN)
    made.step(SOURCE[:3])
    assert made.centering.count == 3
    assert made.centering.total.tolist() == SOURCE[:3].double().sum(0).tolist()


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
