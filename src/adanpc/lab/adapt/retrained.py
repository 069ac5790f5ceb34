"""AdaNPC with BN retraining: the bank grows, and one BatchNorm layer in front of it is trained."""

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
    """A bank that gradients can pass through: rows (n, D) with labels (n,), to which more can be added.

    Args:
        rows: the first rows (n, D).
        labels: their labels (n,).
    """

    rows: Tensor
    labels: Tensor

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows.clone())
        self.register_buffer("labels", labels.clone())

    def join(self, rows: Tensor, labels: Tensor) -> None:
        """Adds rows (m, D) with labels (m,)."""
        self.rows = torch.cat([self.rows, rows])
        self.labels = torch.cat([self.labels, labels])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Replaces the buffers: by now the number of rows may be different, which torch would refuse."""
        self.rows = state_dict[prefix + "rows"].clone()
        self.labels = state_dict[prefix + "labels"].clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class AdaNPCBN(Adapter):
    """AdaNPC behind one BatchNorm layer, which is trained to minimize the entropy of the vote.

    Queries and bank rows pass through the same layer: the bank keeps features as they come from the encoder, and every
    search passes all of them through the current layer. The layer has the statistics of the source features and starts
    as the identity, so the first answers are those of AdaNPC.

    Paper:
        Zhang et al., AdaNPC: Exploring Non-Parametric Classifier for Test-Time Adaptation, ICML 2023: "BN retraining"
        in its Methods section.

    Differs from the published code:
        See ``AdaNPCBNPublished``, which follows the published code.

    Args:
        k: how many rows vote.
        temperature: of the vote.
        min_confidence: an answer joins the bank if its probability is at least this.
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch; the answer is the one before the last step.
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
        self.k = k
        self.temperature = temperature
        self.min_confidence = min_confidence
        self.steps = steps
        self.layer = identity(source.features).to(self.model.device)
        self.bank = Rows(source.features, source.labels).to(self.model.device)
        self.optimizers["layer"] = Adam(self.layer.parameters(), lr=source.lr * alpha)

    def moving(self) -> set[str]:
        """Returns the names of the layer's scale and shift, and of the bank's tensors."""
        return {"layer.weight", "layer.bias", "bank.rows", "bank.labels"}

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C) on features (B, D)."""
        for _ in range(self.steps):
            with torch.enable_grad():
                probs = self._vote(batch)
                descend(entropy_of(probs), self.optimizers["layer"])
        probs = probs.detach()
        confidence, labels = probs.max(1)
        joins = confidence >= self.min_confidence
        self.bank.join(batch[joins], labels[joins])
        return probs.to(batch.dtype)

    def _vote(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C), with gradients through the queries and through their neighbors."""
        queries = normalize(self.layer(batch))
        k = min(self.k, len(self.bank.rows))
        # Which rows are nearest has no gradient, so only the k neighbors pass through the layer a second time with one.
        with torch.no_grad():
            all_keys = normalize(self.layer(self.bank.rows))
            near = (queries @ all_keys.T).topk(k).indices  # (B, K)
        keys = normalize(self.layer(self.bank.rows[near.flatten()])).reshape(*near.shape, -1)  # (B, K, D)
        similarity = (queries[:, None] * keys).sum(2)  # (B, K)
        neighbors = Neighbors(near, similarity, self.bank.labels[near])
        probs, _ = vote(neighbors, self.model.classes, "share", self.temperature)
        return probs


class AdaNPCBNPublished(Adapter):
    """AdaNPC with BN retraining as in its public code, for comparison with published numbers.

    The layer's statistics stay 0 and 1, so it only scales and shifts each coordinate. Source rows do not pass through
    it. The batch joins the bank once for each gradient step, and later steps find these copies. The entropy is that of
    a softmax of the vote, which is very flat.

    Paper:
        Zhang et al., AdaNPC: Exploring Non-Parametric Classifier for Test-Time Adaptation, ICML 2023.

    Args:
        k: how many rows vote.
        temperature: of the vote.
        threshold: see ``AdaNPCPublished``.
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch; gamma in the public code.
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
        temperature: float = 0.01,
        threshold: float = 0.1,
        alpha: float = 0.01,
        steps: int = 3,
    ) -> None:
        super().__init__(source)
        self.k = k
        self.temperature = temperature
        self.threshold = threshold
        self.steps = steps
        self.layer = nn.BatchNorm1d(self.model.dim).eval().to(self.model.device)
        # The published bank starts with one random row of class 0, the only row that is not normalized.
        first_row = torch.rand(1, self.model.dim, generator=torch.Generator().manual_seed(0)) * 2 - 1
        first_row = first_row * (3 / self.model.dim) ** 0.5  # the expected square of its length becomes 1
        first_label = source.labels.new_zeros(1)
        rows = torch.cat([first_row, normalize(source.features)])
        labels = torch.cat([first_label, source.labels])
        self.bank = Rows(rows, labels).to(self.model.device)
        self.optimizers["layer"] = Adam(self.layer.parameters(), lr=source.lr * alpha)

    def moving(self) -> set[str]:
        """Returns the names of the layer's scale and shift, and of the bank's tensors."""
        return {"layer.weight", "layer.bias", "bank.rows", "bank.labels"}

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C) on features (B, D)."""
        for _ in range(self.steps):
            with torch.enable_grad():
                queries = normalize(self.layer(batch))
                k = min(self.k, len(self.bank.rows))
                similarity, near = (queries @ self.bank.rows.T).topk(k)  # (B, K)
                neighbors = Neighbors(near, similarity, self.bank.labels[near])
                probs, _ = vote(neighbors, self.model.classes, "published", self.temperature)
                self._join(queries.detach(), probs.detach())
                descend(entropy_of(probs.softmax(1)), self.optimizers["layer"])
        return probs.detach().to(batch.dtype)

    def _join(self, queries: Tensor, probs: Tensor) -> None:
        """Adds the confident queries (B, D) to the bank."""
        confidence, labels = probs.softmax(1).max(1)  # a softmax of probabilities, as in the published code
        joins = confidence >= self.threshold
        self.bank.join(queries[joins], labels[joins])


def identity(features: Tensor) -> nn.BatchNorm1d:
    """Returns a BatchNorm with the statistics of features (n, D) that changes no vector until it is trained."""
    layer = nn.BatchNorm1d(features.shape[1]).eval()
    mean = features.mean(0)
    variance = features.var(0, unbiased=False)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    with torch.no_grad():
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
        # Scale and shift undo the normalization.
        layer.weight.copy_((variance + layer.eps).sqrt())
        layer.bias.copy_(mean)
    return layer


def entropy_of(probs: Tensor) -> Tensor:
    """Returns the mean entropy () of probabilities (B, C), in nats; zero probabilities contribute nothing."""
    return -(probs * probs.clamp(min=1e-12).log()).sum(1).mean()
