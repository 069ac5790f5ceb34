"""Prototypes in the spaces of small heads that are trained on the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, normalize, one_hot

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.prototypes import KEEP, Supports, head_rows, judged

SHRINK = 4  # features are so many times as wide as what the heads make of them


class TAST(Adapter):
    """The mean prediction of the nearest supports, in the spaces of small random heads that learn to agree with it.

    The supports are those of ``T3A``. Each head maps features to a quarter of their width; there a prediction is the
    softmax of cosines to the classes' mean supports, times ``scale``. The heads are trained so that the prediction for
    a query becomes the share of classes predicted for its nearest supports. The answer is the mean prediction for these
    supports over all heads, before the last update. A batch enters the supports first: an answer depends on the rest of
    its batch.

    Args:
        keep: how many supports a class keeps, those of lowest entropy; None is all.
        heads: how many.
        k: how many supports are asked, by cosine of their features; at most ``keep``, or a class's share of all.
        steps: updates for each batch.
        lr: of Adam.
        scale: of the cosines.
        seed: of the heads' first weights.

    Paper: Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023 (TAST; the
    variant that trains BatchNorm layers is not here).

    Differs from the published code: heads are linear, so class means are mapped instead of all supports, and only
    those supports that are asked, which is the same at a fraction of the cost; ``reset`` brings the first heads back
    instead of drawing new ones.
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
        for name, value in {"heads": heads, "k": k, "steps": steps}.items():
            if value < 1:
                raise AdaNPCError(f"{name} must be at least 1, got {value}")
        self.k, self.steps, self.scale = k, steps, scale
        self.supports = Supports(self.model.classes, keep)
        self.heads = Heads(self.model.dim, heads, seed).to(self.model.device)
        self.optimizers = {"heads": torch.optim.Adam(self.heads.parameters(), lr)}
        self._enter(head_rows(self.model))

    def moving(self) -> set[str]:
        """The heads."""
        return {f"heads.{name}" for name, _ in self.heads.named_parameters()}

    def answer(self, batch: Tensor) -> Tensor:
        """The mean prediction (B, C) for the nearest supports of features (B, D), of which they are part."""
        batch = batch.detach()
        self._enter(batch)
        asked, means = self._asked(batch)
        for _ in range(self.steps):
            probs = self._update(batch, asked, means)
        return probs

    @torch.no_grad()
    def _enter(self, rows: Tensor) -> None:
        self.supports.add(rows, *judged(self.model, rows))

    def _asked(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest supports (B k, D), and the mean support of each class (C, D), 0 where there is none."""
        rows, labels = self.supports.rows()
        k = min(self.k, self.supports.keep or max(1, len(rows) // self.model.classes), len(rows))
        near = (normalize(batch, dim=1) @ normalize(rows, dim=1).T).topk(k, 1).indices  # (B, k)
        counts = labels.bincount(minlength=self.model.classes)
        sums = rows.new_zeros(self.model.classes, rows.shape[1]).index_add_(0, labels, rows)
        return rows[near.flatten()], sums / counts.clamp(min=1)[:, None]

    @torch.enable_grad()
    def _update(self, batch: Tensor, asked: Tensor, means: Tensor) -> Tensor:
        """The answers before a step of the heads toward them."""
        sizes = [len(batch), len(asked)]
        queries, near = self._logits(torch.cat([batch, asked]), means).split(sizes, 1)  # (E, B, C), (E, B k, C)
        near = near.detach().unflatten(1, (len(batch), -1))  # (E, B, k, C)
        targets = one_hot(near.argmax(3), near.shape[3]).to(near).mean(2)  # (E, B, C)
        loss = kl_div(queries.log_softmax(2), targets, reduction="sum") / targets[0].numel()
        self.optimizers["heads"].zero_grad()
        loss.backward()
        self.optimizers["heads"].step()
        probs: Tensor = near.softmax(3).mean((0, 2))
        return probs

    def _logits(self, rows: Tensor, means: Tensor) -> Tensor:
        """Scaled cosines (E, n, C) of rows to means, as each head sees them."""
        held = means.any(1)[None, :, None]  # a class without supports has logit 0, whatever the heads add
        mapped, centers = self.heads(torch.cat([rows, means])).split([len(rows), len(means)], 1)
        return self.scale * normalize(mapped, dim=2) @ normalize(centers * held, dim=2).transpose(1, 2)


class Heads(nn.Module):
    """Linear maps (E, n, D / 4) of rows (n, D) that share one matrix; each scales inputs and outputs on its own.

    Args:
        dim: D.
        count: E.
        seed: of the first weights.
    """

    def __init__(self, dim: int, count: int, seed: int) -> None:
        super().__init__()
        generator, out = torch.Generator().manual_seed(seed), max(1, dim // SHRINK)
        self.matrix, self.inner, self.outer = (
            nn.Parameter(nn.init.kaiming_normal_(torch.empty(shape), generator=generator))
            for shape in ((out, dim), (count, dim), (count, out))
        )
        self.bias = nn.Parameter(torch.zeros(count, out))

    def forward(self, rows: Tensor) -> Tensor:
        """Rows as each head sees them."""
        return (rows * self.inner[:, None]) @ self.matrix.T * self.outer[:, None] + self.bias[:, None]
