"""TAST: prototypes in the output spaces of small heads that are trained on the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, normalize, one_hot
from torch.optim import Adam

from adanpc import require
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.prototypes import KEEP, Supports, head_rows, labels_and_entropies

SHRINK = 4  # the features have this many times the dimension of the heads' outputs


class TAST(Adapter):
    """Answers a query with the mean prediction of small trained heads for its nearest supports.

    The supports are those of ``T3A``. Each head maps features to a quarter of their dimension. In that space, a
    prediction is the softmax of the cosines to the mean support of each class, times ``scale``. The heads are trained
    so that the prediction for a query approaches the shares of the classes predicted for its nearest supports. The
    answer is the mean prediction for these supports over all heads, before the last step. A batch joins the supports
    before it is answered, so an answer depends on the rest of its batch.

    Paper:
        Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023; without its
        variant that trains BatchNorm layers.

    Differs from the published code:
        Heads are linear, so only class means and the nearest supports are mapped instead of all supports: the same
        result at a fraction of the cost. ``reset`` restores the first heads instead of drawing new ones.

    Args:
        keep: how many supports a class keeps, those of lowest entropy; None keeps all.
        heads: the number of heads.
        k: the number of nearest supports, by the cosine of their features; at most ``keep``, or the average number of
            supports per class if all are kept.
        steps: the number of steps on each batch.
        lr: the learning rate of Adam.
        scale: what cosines are multiplied by.
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
        """Returns the names of the heads' weights; the supports are saved separately."""
        return {f"heads.{name}" for name, _ in self.heads.named_parameters()}

    def answer(self, batch: Tensor) -> Tensor:
        """Adds features (B, D) to the supports; returns the mean prediction (B, C) for their nearest supports."""
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
        """Adds rows (B, D) to the supports of the classes that the head predicts for them."""
        labels, entropies = labels_and_entropies(self.model, rows)
        self.supports.add(rows, labels, entropies)

    def _nearest(self, batch: Tensor, rows: Tensor) -> Tensor:
        """Returns the k nearest rows of each query, one query after another (B k, D)."""
        rows_per_class = self.supports.keep or max(1, len(rows) // self.model.classes)
        k = min(self.k, rows_per_class, len(rows))
        similarity = normalize(batch, dim=1) @ normalize(rows, dim=1).T
        near = similarity.topk(k, 1).indices  # (B, k)
        return rows[near.flatten()]

    def _means(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean row of each class (C, D), 0 for a class without rows."""
        classes = self.model.classes
        counts = labels.bincount(minlength=classes)
        sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, labels, rows)
        return sums / counts.clamp(min=1)[:, None]

    @torch.enable_grad()
    def _update(self, batch: Tensor, nearest: Tensor, means: Tensor) -> Tensor:
        """Returns the answers (B, C) of the heads, then makes one step of training them.

        Args:
            batch: (B, D) the queries.
            nearest: (B k, D) their nearest supports.
            means: (C, D) the mean support of each class.
        """
        logits = self._logits(torch.cat([batch, nearest]), means)
        queries, near = logits.split([len(batch), len(nearest)], 1)  # (E, B, C), (E, B k, C)
        near = near.detach().unflatten(1, (len(batch), -1))  # (E, B, k, C)
        targets = one_hot(near.argmax(3), near.shape[3]).to(near).mean(2)  # (E, B, C)
        # The mean over queries and classes for each head, summed over heads: a head's step ignores how many there are.
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
        # A class without supports gets the logit 0. Its mean is 0, but the bias of the heads would map it elsewhere.
        has_supports = means.any(1)[:, None]
        queries = normalize(queries, dim=2)
        centers = normalize(centers * has_supports, dim=2)
        return self.scale * queries @ centers.transpose(1, 2)


class Heads(nn.Module):
    """Maps rows (n, D) linearly to (E, n, D / 4), with E heads.

    The heads share one matrix; each has its own scales of the inputs and the outputs, and its own bias.

    Args:
        dim: the dimension D of the rows.
        count: the number E of heads.
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
        """Returns the outputs (E, n, D / 4) of each head for rows (n, D)."""
        scaled = rows * self.inner[:, None]
        return scaled @ self.matrix.T * self.outer[:, None] + self.bias[:, None]


def _random_parameter(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    """Returns a random matrix with He initialization."""
    return nn.Parameter(nn.init.kaiming_normal_(torch.empty(rows, columns), generator=generator))
