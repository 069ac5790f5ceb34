"""A model and domains small enough to check training by hand, and what to compare after it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch

DIM, CLASSES = 4, 3
Make = Callable[[], Algorithm]


def model(seed: int = 0, *, norm: bool = False) -> SourceModel:
    """Six numbers to four features to three logits."""
    torch.manual_seed(seed)
    return SourceModel(nn.Sequential(nn.Flatten(), nn.Linear(6, DIM), nn.Tanh()), DIM, CLASSES, norm=norm)


def batches(*sizes: int, seed: int = 0) -> list[Batch]:
    """One batch of each size; the domains differ by an offset, the classes by another."""
    generator, made = torch.Generator().manual_seed(seed), []
    for domain, size in enumerate(sizes):
        labels = torch.randint(CLASSES, (size,), generator=generator)
        noise = torch.randn(size, 1, 2, 3, generator=generator)
        images = noise + nn.functional.one_hot(labels, 6).reshape(size, 1, 2, 3) * 2 + domain / 2
        made.append(Batch(images, labels, torch.arange(size)))
    return made


def same(size: int, domains: int) -> list[Batch]:
    """The same batch from every domain."""
    return batches(size) * domains


def trained(algorithm: Algorithm, steps: int, sizes: Sequence[int] = (8, 8, 8), first: int = 0) -> list[Tensor]:
    """The weights after steps on fixed batches; the seed of a step is its number."""
    for step in range(first, first + steps):
        torch.manual_seed(step)
        algorithm.update(batches(*sizes, seed=step))
    return weights(algorithm.model)


def weights(module: nn.Module) -> list[Tensor]:
    """Copies of all weights and buffers."""
    return [value.detach().clone() for value in module.state_dict().values()]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two lists of weights are the same to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: Sequence[Tensor], other: Sequence[Tensor], atol: float = 1e-6) -> bool:
    """Whether two lists of weights differ by rounding alone."""
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(one, other, strict=True))


def resumes(make: Make, stop: int, steps: int) -> bool:
    """Whether training that is saved and loaded at a step goes on to the bit as if it had not been."""
    stopped, file = make(), io.BytesIO()
    trained(stopped, stop)
    torch.save(stopped.checkpoint(), file)
    file.seek(0)
    fresh = make()
    trained(fresh, 1, first=99)
    fresh.restore(torch.load(file, weights_only=True))
    whole = make()
    expected = trained(whole, steps)
    return equal(trained(fresh, steps - stop, first=stop), expected) and equal(weights(fresh), weights(whole))
