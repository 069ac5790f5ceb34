"""KNN: the paper's loss as a training algorithm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.train.neighbors import KNN
from adanpc.losses import KNNLoss
from adanpc.testing.algorithms import CLASSES, DOMAINS, advance, toy_batches, toy_model


def everything(step: int) -> tuple[Tensor, Tensor, Tensor]:
    images, labels, keys = (torch.cat([batch[column] for batch in toy_batches(step)]) for column in range(3))
    return images, labels, keys


def test_the_temperature_falls_to_its_end_and_no_further() -> None:
    """The published schedule is 1 - 0.9 * step / 5000, which is negative from step 5,556 on."""
    algorithm = KNN(toy_model(), DOMAINS, temperature=0.1, anneal=5000)
    assert [algorithm.temperature_at(step) for step in (0, 2500, 5000, 5556, 10**6)] == pytest.approx(
        [1.0, 0.55, 0.1, 0.1, 0.1]
    )
    assert KNN(toy_model(), DOMAINS, temperature=0.2).temperature_at(0) == pytest.approx(0.2)
    with pytest.raises(AdaNPCError, match="anneal must be 0 or more steps, got -1"):
        KNN(toy_model(), DOMAINS, anneal=-1)


def test_the_queue_starts_with_as_many_real_samples_as_it_holds() -> None:
    asked: list[int | None] = []

    def sampler(count: int | None) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(count)
        _, labels, keys = everything(7)
        return torch.rand(len(labels), 16)[:count], labels[:count], keys[:count]

    algorithm = KNN(toy_model(), DOMAINS, k=3, size=11)
    for _ in range(3):
        algorithm.prepare(sampler)
    assert asked == [11]
    assert len(algorithm.knn.bank) == 11


def test_the_encoder_follows_the_vote_alone_and_the_head_the_cross_entropy_alone() -> None:
    algorithm = KNN(toy_model(), DOMAINS, k=3, size=20)
    advance(algorithm, range(2))
    images, labels, _ = everything(2)
    plain = KNNLoss(16, CLASSES, k=3, size=20, live_keys=True)
    plain.load_state_dict(algorithm.knn.state_dict())
    features = algorithm.model.features(images)
    encoder = list(algorithm.model.encoder.parameters())
    expected = torch.autograd.grad(plain(features, labels), encoder)
    loss, parts = algorithm.loss(toy_batches(2))
    found = torch.autograd.grad(loss, encoder, retain_graph=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))
    head = list(algorithm.model.head.parameters())
    logits = algorithm.model.head(features.detach())
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), head)
    found = torch.autograd.grad(loss, head)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))
    assert loss.item() == pytest.approx(float(parts["vote"] + parts["head"]), abs=1e-5)
