"""COME: an entropy with a mass for knowing nothing."""

from __future__ import annotations

import math

import pytest
import torch
from sources import images, source

from adanpc.lab.adapt.come import EATACOME, SARCOME, TentCOME, opinion_entropy
from adanpc.lab.adapt.entropy import EntropyDescent
from adanpc.lab.adapt.tent import Tent


@pytest.mark.parametrize("classes", [3, 1000])
def test_entropy_is_that_of_the_masses(classes: int) -> None:
    logits = 4 * torch.randn(5, classes, generator=torch.Generator().manual_seed(0))
    for row, got in zip(logits.double(), opinion_entropy(logits), strict=True):
        total = sum(math.exp(x) for x in row.tolist()) + classes
        masses = [math.exp(x) / total for x in row.tolist()] + [classes / total]
        expected = -sum((mass + 1e-7) * math.log(mass + 1e-7) for mass in masses)
        assert float(got) == pytest.approx(expected, rel=1e-4)


def test_descending_does_not_make_logits_longer() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (gradient,) = torch.autograd.grad(opinion_entropy(logits).sum(), logits)
    assert torch.allclose((gradient * logits).sum(1), torch.zeros(6), atol=1e-5)
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("kind", [TentCOME, EATACOME, SARCOME])
def test_every_method_measures_by_it(kind: type[EntropyDescent]) -> None:
    logits = torch.randn(4, 3)
    start = source("batch2d")
    start = type(start)(start.model, start.features, start.labels, images=lambda rows: images(30, seed=6)[rows])
    assert torch.equal(kind(start).uncertainty(logits), opinion_entropy(logits))  # type: ignore[call-arg]


def test_tent_moves_elsewhere_with_it() -> None:
    batch = images(16, seed=2)
    plain = Tent(source("batch2d"))
    other = TentCOME(source("batch2d"))
    assert torch.equal(plain.step(batch), other.step(batch))
    assert not torch.equal(plain.step(batch), other.step(batch))
