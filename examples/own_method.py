"""Write a test-time method: run this file, or `adanpc adapt RUN --method examples/own_method.py:ClassPrior`."""

import torch
from torch import Tensor

from adanpc.lab.adapt import Adapter, Source
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter


class ClassPrior(Adapter):
    """Multiplies the head's answers by how often each class was answered so far, for streams with other class shares.

    Args:
        memory: how many samples the first guess, that all classes are equally frequent, counts for.
    """

    sees = "features"  # like most methods without gradients; the default is images
    prior: Tensor

    def __init__(self, source: Source, *, memory: float = 50.0) -> None:
        super().__init__(source)  # copies the model to self.model
        classes = self.model.classes
        self.register_buffer("prior", torch.full((classes,), memory / classes, device=self.model.device))

    def moving(self) -> set[str]:
        return {"prior"}  # so that reset() and predict() put it back

    def answer(self, batch: Tensor) -> Tensor:
        probs: Tensor = self.model.head(batch).softmax(1) * self.prior  # (B, C)
        probs = probs / probs.sum(1, keepdim=True)
        self.prior += probs.sum(0)
        return probs


if __name__ == "__main__":
    check_adapter(ClassPrior)  # reset, state, predict, bad batches, …: all that the library promises

    # Three overlapping classes, and a stream in which the first is ten times as frequent as the others.
    torch.manual_seed(0)
    centers = torch.eye(3)
    labels = torch.multinomial(torch.tensor([10.0, 1.0, 1.0]), 600, replacement=True)
    stream = centers[labels] + 0.7 * torch.randn(600, 3)

    model = SourceModel(torch.nn.Identity(), dim=3, classes=3)
    model.load_state_dict({"head.weight": 2 * centers, "head.bias": torch.zeros(3)})  # best for equal frequencies
    source = Source(model, features=centers, labels=torch.arange(3))
    adapter = ClassPrior(source)

    fixed = model.head(stream).argmax(1)
    adapted = torch.cat([adapter.step(batch).argmax(1) for batch in stream.split(20)])
    for name, answers in {"the fixed head": fixed, "with ClassPrior": adapted}.items():
        print(f"{name}: {(answers == labels).float().mean():.1%} right")
