"""Prototypes in the output spaces of small heads that are trained on the stream: TAST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, normalize, one_hot
from torch.optim import Adam

from adanpc import require
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.prototypes import KEEP, Supports, head_rows, judged

SHRINK = 4  # features are this many times as wide as the outputs of the heads


class TAST(Adapter):
    """Answers with the mean prediction for the nearest supports, by small random heads trained to agree with it.

    The supports are those of ``T3A``. Each head maps features to a quarter of their width; there a prediction is the
    softmax of the cosines to the mean support of each class, times ``scale``. The heads are trained so that the
    prediction for a query becomes the share of classes predicted for its nearest supports. The answer is the mean
    prediction for these supports over all heads, before the last update. A batch becomes part of the supports before
    it is answered: an answer depends on the rest of its batch.

    Paper:
        Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023; without its
        variant that trains BatchNorm layers.

    Differs from the published code:
        Heads are linear, so it is enough to map class means instead of all supports, and of the supports only the
        nearest: the same result at a fraction of the cost. ``reset`` brings the first heads back instead of drawing
        new ones.

    Args:
        keep: how many supports a class keeps, those of lowest entropy; None keeps all.
        heads: how many.
        k: how many nearest supports, by cosine of their features; at most ``keep``, or a class's share of all.
        steps: how many are made on each batch.
        lr: of Adam.
        scale: of the cosines.
        seed: of the heads' first weights.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "keep": (*KEEP, None),
        "heads": (1, 5, 10, 20),
        "k": (1, 2, 4, 8),
        "steps": (1, 3),
    }

    def __init__(
        self,
        source: Source,
        *,
        keep: int | None = 100,
        heads: int = 20,
        k: int = 4,
        steps: int = 1,
        lr: float = 1e-3,
        scale: float = 10.0,
        seed: int = 0,
    ) -> None:
        super().__init__(source)
        require.whole("heads", heads, least=1)
        self.k = require.whole("k", k, least=1)
        self.steps = require.whole("steps", steps, least=1)
        self.scale = scale
        self.supports = Supports(self.model.classes, keep)
        self.heads = Heads(self.model.dim, heads, seed).to(self.model.device)
        self.optimizers["heads"] = Adam(self.heads.parameters(), lr)
        self._add(head_rows(self.model))

    def moving(self) -> set[str]:
        """Returns the weights of the heads; the supports are not tensors of this module."""
        return {f"heads.{name}" for name, _ in self.heads.named_parameters()}

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the mean prediction (B, C) for the nearest supports of features (B, D), which now are among them."""
        batch = batch.detach()
        self._add(batch)
        rows, labels = self.supports.rows()
        nearest = self._nearest(batch, rows)
        means = self._means(rows, labels)
        for _ in range(self.steps):
            probs = self._update(batch, nearest, means)
        return probs

    @torch.no_grad()
    def _add(self, rows: Tensor) -> None:
        """Makes rows (B, D) supports of the classes that the head predicts for them."""
        labels, entropies = judged(self.model, rows)
        self.supports.add(rows, labels, entropies)

    def _nearest(self, batch: Tensor, rows: Tensor) -> Tensor:
        """Returns the k nearest rows of each query, one query after another (B k, D)."""
        share = self.supports.keep or max(1, len(rows) // self.model.classes)
        k = min(self.k, share, len(rows))
        similarity = normalize(batch, dim=1) @ normalize(rows, dim=1).T
        near = similarity.topk(k, 1).indices  # (B, k)
        return rows[near.flatten()]

    def _means(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean row of each class (C, D), 0 where there is none."""
        classes = self.model.classes
        counts = labels.bincount(minlength=classes)
        sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, labels, rows)
        return sums / counts.clamp(min=1)[:, None]

    @torch.enable_grad()
    def _update(self, batch: Tensor, nearest: Tensor, means: Tensor) -> Tensor:
        """Returns the answers (B, C), and makes one step of the heads toward them.

        Args:
            batch: (B, D) the queries.
            nearest: (B k, D) their nearest supports.
            means: (C, D) the mean support of each class.
        """
        logits = self._logits(torch.cat([batch, nearest]), means)
        queries, near = logits.split([len(batch), len(nearest)], 1)  # (E, B, C), (E, B k, C)
        near = near.detach().unflatten(1, (len(batch), -1))  # (E, B, k, C)
        targets = one_hot(near.argmax(3), near.shape[3]).to(near).mean(2)  # (E, B, C)
        loss = kl_div(queries.log_softmax(2), targets, reduction="sum") / targets[0].numel()
        self.optimizers["heads"].zero_grad()
        loss.backward()
        self.optimizers["heads"].step()
        probs: Tensor = near.softmax(3).mean((0, 2))
        return probs

    def _logits(self, rows: Tensor, means: Tensor) -> Tensor:
        """Returns the scaled cosines (E, n, C) of rows (n, D) to means (C, D), as each head sees them."""
        mapped = self.heads(torch.cat([rows, means]))
        queries, centers = mapped.split([len(rows), len(means)], 1)
        has_supports = means.any(1)[:, None]  # a class without any has logit 0, whatever the heads add
        queries = normalize(queries, dim=2)
        centers = normalize(centers * has_supports, dim=2)
        return self.scale * queries @ centers.transpose(1, 2)


class Heads(nn.Module):
    """Maps rows (n, D) linearly to (E, n, D / 4); the heads share a matrix, and scale inputs and outputs on their own.

    Args:
        dim: D.
        count: how many heads; E.
        seed: of the first weights.
    """

    def __init__(self, dim: int, count: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        out = max(1, dim // SHRINK)
        self.matrix = _random_parameter(out, dim, generator)
        self.inner = _random_parameter(count, dim, generator)
        self.outer = _random_parameter(count, out, generator)
        self.bias = nn.Parameter(torch.zeros(count, out))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns rows as each head sees them."""
        scaled = rows * self.inner[:, None]
        return scaled @ self.matrix.T * self.outer[:, None] + self.bias[:, None]


def _random_parameter(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(nn.init.kaiming_normal_(torch.empty(rows, columns), generator=generator))
