"""The bank and one BatchNorm layer before it move: AdaNPC with BN retraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.optim import Adam

from adanpc.core import Neighbors, vote
from adanpc.lab.adapt.adapter import Adapter, Source, descend
from adanpc.lab.adapt.bank import TEMPERATURES


class Rows(nn.Module):
    """A bank whose rows are tensors, for gradients: rows (n, D) and labels (n,), to which others are joined.

    Args:
        rows, labels: the first ones.
    """

    rows: Tensor
    labels: Tensor

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows.clone())
        self.register_buffer("labels", labels.clone())

    def join(self, rows: Tensor, labels: Tensor) -> None:
        """Adds rows (m, D) with labels (m,)."""
        self.rows, self.labels = torch.cat([self.rows, rows]), torch.cat([self.labels, labels])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes the buffers as they come: there may be another number of rows by now."""
        self.rows, self.labels = state_dict[prefix + "rows"].clone(), state_dict[prefix + "labels"].clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class AdaNPCBN(Adapter):
    """AdaNPC behind one BatchNorm layer, whose scale and shift descend the entropy of the vote.

    Queries and bank rows pass the same layer: the bank keeps features as the encoder made them, and every search sees
    all of them through the layer as it is now. The layer has the statistics of the source features and starts as the
    identity, so that the first answers are AdaNPC's.

    Args:
        k, temperature: of the vote.
        min_confidence: an answer joins if its probability is at least this.
        alpha: the learning rate, in units of the source's.
        steps: gradient steps for each batch; the answer is that of the last one.

    Paper: "BN retraining" in the Methods section.

    Differs from the published code: see ``AdaNPCBNPublished``.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "k": (1, 5),
        "temperature": TEMPERATURES,
        "min_confidence": (0.0, 0.5, 0.9),
        "alpha": (0.1, 1.0, 10.0),
        "steps": (1, 3),
    }

    def __init__(
        self,
        source: Source,
        *,
        k: int = 10,
        temperature: float = 0.1,
        min_confidence: float = 0.9,
        alpha: float = 1.0,
        steps: int = 1,
    ) -> None:
        super().__init__(source)
        self.k, self.temperature, self.min_confidence, self.steps = k, temperature, min_confidence, steps
        device = self.model.device
        self.layer = identity(source.features).to(device)
        self.bank = Rows(source.features, source.labels).to(device)
        self.optimizers["layer"] = Adam(self.layer.parameters(), lr=source.lr * alpha)

    def moving(self) -> set[str]:
        """The layer's scale and shift, and the bank."""
        return {"layer.weight", "layer.bias", "bank.rows", "bank.labels"}

    def answer(self, batch: Tensor) -> Tensor:
        """The vote on features (B, D)."""
        for _ in range(self.steps):
            with torch.enable_grad():
                probs = self._vote(batch)
                descend(entropy_of(probs), self.optimizers["layer"])
        probs = probs.detach()
        confidence, labels = probs.max(1)
        sure = confidence >= self.min_confidence
        self.bank.join(batch[sure], labels[sure])
        return probs.to(batch.dtype)

    def _vote(self, batch: Tensor) -> Tensor:
        """Probabilities with gradients through the queries and through the neighbors."""
        queries = normalize(self.layer(batch))
        with torch.no_grad():
            near = (
                (queries @ normalize(self.layer(self.bank.rows)).T).topk(min(self.k, len(self.bank.rows))).indices
            )  # (B, K)
        keys = normalize(self.layer(self.bank.rows[near.flatten()])).reshape(*near.shape, -1)
        similarity = (queries[:, None] * keys).sum(2)
        return vote(Neighbors(near, similarity, self.bank.labels[near]), self.model.classes, "share", self.temperature)[
            0
        ]


class AdaNPCBNPublished(Adapter):
    """AdaNPC+BN as the public code has it, for comparison with published numbers.

    The layer's statistics stay 0 and 1, so that it is a scale and a shift of each coordinate; source rows do not pass
    it; the batch joins once for each gradient step, and later steps find these copies of it; the descended entropy is
    that of a softmax of the vote, which is very flat.

    Args:
        k, temperature: of the vote.
        threshold: see ``AdaNPCPublished``.
        alpha: the learning rate, in units of the source's.
        steps: for each batch; called gamma there.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "k": (1, 5),
        "temperature": TEMPERATURES,
        "threshold": (0.0, 0.25, 0.75, 1.1),
        "alpha": (0.1, 1.0, 10.0),
        "steps": (1, 3),
    }

    def __init__(
        self,
        source: Source,
        *,
        k: int = 100,
        temperature: float = 0.1,
        threshold: float = 0.1,
        alpha: float = 1.0,
        steps: int = 1,
    ) -> None:
        super().__init__(source)
        self.k, self.temperature, self.threshold, self.steps = k, temperature, threshold, steps
        device = self.model.device
        self.layer = nn.BatchNorm1d(self.model.dim).eval().to(device)
        first = torch.rand(1, self.model.dim, generator=torch.Generator().manual_seed(0)) * 2 - 1
        rows, labels = torch.cat([first, source.features]), torch.cat([source.labels.new_zeros(1), source.labels])
        self.bank = Rows(normalize(rows), labels).to(device)
        self.optimizers["layer"] = Adam(self.layer.parameters(), lr=source.lr * alpha)

    def moving(self) -> set[str]:
        """The layer's scale and shift, and the bank."""
        return {"layer.weight", "layer.bias", "bank.rows", "bank.labels"}

    def answer(self, batch: Tensor) -> Tensor:
        """The vote on features (B, D)."""
        for _ in range(self.steps):
            with torch.enable_grad():
                queries = normalize(self.layer(batch))
                similarity, near = (queries @ self.bank.rows.T).topk(min(self.k, len(self.bank.rows)))
                found = Neighbors(near, similarity, self.bank.labels[near])
                probs, _ = vote(found, self.model.classes, "published", self.temperature)
                self._join(queries.detach(), probs.detach())
                descend(entropy_of(probs.softmax(1)), self.optimizers["layer"])
        return probs.detach().to(batch.dtype)

    def _join(self, queries: Tensor, probs: Tensor) -> None:
        confidence, labels = probs.softmax(1).max(1)
        sure = confidence >= self.threshold
        self.bank.join(queries[sure], labels[sure])


def identity(features: Tensor) -> nn.BatchNorm1d:
    """A BatchNorm in evaluation mode with the statistics of features (n, D), which leaves every vector as it is."""
    layer = nn.BatchNorm1d(features.shape[1]).eval()
    mean, variance = features.mean(0), features.var(0, unbiased=False)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    with torch.no_grad():
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
        layer.weight.copy_((variance + layer.eps).sqrt())
        layer.bias.copy_(mean)
    return layer


def entropy_of(probs: Tensor) -> Tensor:
    """The mean entropy of probabilities (B, C), in nats; classes without any add nothing."""
    return -(probs * probs.clamp(min=1e-12).log()).sum(1).mean()
