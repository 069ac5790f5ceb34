"""Write a training algorithm: run this, or `adanpc train … --algorithm examples/own_algorithm.py:WorstDomain`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train import ALGORITHMS, Algorithm, Batch
from adanpc.lab.train.algorithm import losses
from adanpc.testing import check_algorithm


class WorstDomain(Algorithm):
    """Adds the loss of the worst domain to the mean loss of all domains.

    Args:
        weight: how much the loss of the worst domain counts.
    """

    erm: ClassVar[Mapping[str, Any] | None] = {"weight": 0.0}  # settings that make it plain ERM; a check compares both

    def __init__(self, model: SourceModel, domains: int, *, weight: float = 1.0, **adam: float) -> None:
        super().__init__(model, domains, **adam)  # lr and weight_decay
        self.weight = weight

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        each = losses(self.model, batches)  # (domains,)
        worst = each.max()
        total = each.mean() + self.weight * worst
        return total, {"worst": worst.detach()}  # the loss to descend, and numbers to record


def draw(domain: int, rows: int) -> Batch:
    """Two classes. One input tells them apart in all domains, the other in domains 0 and 1; in domain 2 it misleads."""
    labels = torch.randint(2, (rows,))
    sign = 2.0 * labels - 1  # (B,)
    shortcut = -sign if domain == 2 else sign
    inputs = torch.stack([sign, shortcut], 1) + torch.randn(rows, 2)  # (B, 2)
    return Batch(inputs, labels, torch.arange(rows))


if __name__ == "__main__":
    check_algorithm(WorstDomain)  # it learns, resumes, equals ERM with weight 0, …: all that the library promises

    for kind in (ALGORITHMS["erm"], WorstDomain):
        torch.manual_seed(0)
        model = SourceModel(nn.Identity(), dim=2, classes=2)
        algorithm = kind(model, domains=3, lr=0.05)
        for _ in range(200):
            algorithm.update([draw(domain, rows=64) for domain in range(3)])
        accuracies = []
        for domain in range(3):
            test = draw(domain, rows=5000)
            right = algorithm(test.images).argmax(1) == test.labels
            accuracies.append(f"{right.float().mean():.1%}")
        print(f"{kind.__name__}: {', '.join(accuracies)} right in domains 0, 1, 2")
