"""Answers by one direction for each class."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lab.adapt.directions import CLASSES, DIM, directions, softmax, source, stream, unit
from torch import nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.zero_shot import ZeroShot


def test_answers_are_those_of_cosines_with_the_rows_of_the_head() -> None:
    batch = stream(20)
    expected = softmax(100 * unit(batch) @ unit(directions()).T)
    answers = ZeroShot(source()).step(batch)
    assert torch.allclose(answers.double(), torch.from_numpy(expected), atol=1e-4)
    assert torch.allclose(ZeroShot(source()).step(7 * batch), answers, atol=1e-4)  # whatever the length


def test_means_are_those_of_the_directions_of_source_features() -> None:
    features = torch.tensor([[2.0, 0.0], [0.0, 5.0], [1.0, 1.0]])
    model = source().model
    small = replace(source(), model=type(model)(nn.Identity(), 2, 2), features=features, labels=torch.tensor([0, 0, 1]))
    adapter = ZeroShot(small, prototypes="means")
    assert torch.allclose(adapter.directions, torch.full((2, 2), 0.5).sqrt())


def test_directions_that_are_not_known_are_refused() -> None:
    start = source()
    start.model.head = nn.Sequential(nn.Linear(DIM, CLASSES), nn.ReLU())
    with pytest.raises(AdaNPCError, match="use prototypes='means'"):
        ZeroShot(start)
    few = replace(source(), features=directions()[:2], labels=torch.arange(2))
    with pytest.raises(AdaNPCError, match="3 classes have no source features"):
        ZeroShot(few, prototypes="means")
    with pytest.raises(AdaNPCError, match="prototypes must be one of"):
        ZeroShot(source(), prototypes="heads")
