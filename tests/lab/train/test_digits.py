"""Every algorithm on real digits: fifty steps, and clearly better than chance on an angle it never saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adanpc import AdaNPC, MemoryBank
from adanpc.lab.data import Domain, rotated_digits, split
from adanpc.lab.networks import build
from adanpc.lab.networks.features import features
from adanpc.lab.train.batches import Steps
from adanpc.lab.train.registry import ALGORITHMS

SOURCES, TARGET = (0, 15, 45, 60), 30
CHANCE = 0.1
# Published weights that need larger batches or a longer warm-up than fifty steps of eight.
SETTINGS: dict[str, dict[str, Any]] = {"mmd": {"weight": 0.1}}
BATCHES = {"dann": 16, "cdann": 16}


def small(image: torch.Tensor) -> torch.Tensor:
    """A digit of seven by seven pixels: enough to be told apart, and quickly learned."""
    return torch.nn.functional.avg_pool2d(image, 4)


@pytest.fixture(scope="module")
def domains() -> list[Domain]:
    """The training parts of the source domains, and the target."""
    *known, target = [domain.with_transform(small) for domain in rotated_digits((*SOURCES, TARGET))]
    return [*(split(domain, 0)[0] for domain in known), target]


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ALGORITHMS)
def test_fifty_steps_beat_chance_on_an_unseen_angle(name: str, domains: list[Domain]) -> None:
    *sources, target = domains
    torch.manual_seed(0)
    algorithm = ALGORITHMS[name](
        build("convnet", 10, channels=1), len(sources), **{"lr": 1e-3, **SETTINGS.get(name, {})}
    )
    steps = Steps(sources, BATCHES.get(name, 8), seed=0)

    def sampler(count: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        some = sources[0].subset(range(100))
        return features(algorithm.model, some), some.labels, torch.arange(100)

    for step in range(50):
        algorithm.train()
        algorithm.prepare(sampler)
        algorithm.update(steps[step])
    unseen = target.subset(range(400))
    seen = features(algorithm.model, unseen)
    if name == "knn":  # is trained for a vote, and its head only follows
        bank = AdaNPC(MemoryBank(128, 10))
        for domain in sources:
            known = domain.subset(range(200))
            bank.learn(features(algorithm.model, known), known.labels)
        answers = bank.predict(seen).labels
    else:
        answers = algorithm.model.head(seen).argmax(1)
    accuracy = (answers == unseen.labels).float().mean().item()
    assert accuracy > 1.6 * CHANCE, f"{name}: {accuracy:.2f}"  # chance has a standard deviation of 0.015 here
