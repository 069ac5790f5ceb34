"""Prototypes of classes, made of the features that the head was sure of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.networks.source import SourceModel

KEEP = (1, 5, 20, 50, 100)  # what T3A and TAST searched, beside all of them


class Supports(nn.Module):
    """Features by class, each with the entropy of its prediction; where a class has too many, the highest leaves.

    Of equal entropies the latest leaves. A class is a heap: a row enters or leaves in logarithmic time.

    Args:
        classes: how many.
        keep: how many rows a class may have; None is all.
    """

    def __init__(self, classes: int, keep: int | None) -> None:
        super().__init__()
        if keep is not None and keep < 1:
            raise AdaNPCError(f"keep must be at least 1, or None for all, got {keep}")
        self.keep, self.arrived = keep, 0
        self.heaps: list[list[tuple[float, int, Tensor]]] = [[] for _ in range(classes)]  # the worst row first

    def add(self, rows: Tensor, labels: Tensor, entropies: Tensor) -> tuple[list[Tensor], list[int]]:
        """The rows that left, and their classes, because these (B, D) entered."""
        left = []
        for row, label, height in zip(rows, labels.tolist(), entropies.tolist(), strict=True):
            heap = self.heaps[label]
            heappush(heap, (-height, -self.arrived, row.clone()))  # a view would keep the whole batch alive
            self.arrived += 1
            if self.keep is not None and len(heap) > self.keep:
                left.append((heappop(heap)[2], label))
        return [row for row, _ in left], [label for _, label in left]

    def shed(self) -> tuple[list[Tensor], list[int]]:
        """The rows that left, and their classes: the worst of every class, were it the last."""
        labels = [label for label, heap in enumerate(self.heaps) if heap]
        return [heappop(self.heaps[label])[2] for label in labels], labels

    def rows(self) -> tuple[Tensor, Tensor]:
        """All rows (N, D) and their classes (N,); there must be one."""
        rows = torch.stack([row for heap in self.heaps for _, _, row in heap])
        labels = [label for label, heap in enumerate(self.heaps) for _ in heap]
        return rows, torch.tensor(labels, device=rows.device)

    def get_extra_state(self) -> dict[str, Any]:
        """For ``state_dict``."""
        filled = any(self.heaps)
        keys = [[(worst, order) for worst, order, _ in heap] for heap in self.heaps]
        return {"keys": keys, "rows": self.rows()[0] if filled else None, "arrived": self.arrived}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """For ``load_state_dict``."""
        rows = iter(() if state["rows"] is None else state["rows"].unbind())
        self.heaps = [[(worst, order, next(rows).clone()) for worst, order in heap] for heap in state["keys"]]
        for heap in self.heaps:
            heapify(heap)
        self.arrived = state["arrived"]


class Prototypes(nn.Module):
    """One direction for each class: that of the sum of the directions of its supports.

    Only the classes of supports that come or go are computed anew.

    Args:
        like: (C, D) of the dtype and device that the directions are to have.
    """

    sums: Tensor
    counts: Tensor
    directions: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros_like(like, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros_like(like[:, 0], dtype=torch.int64))
        self.register_buffer("directions", torch.zeros_like(like))

    def moving(self, name: str) -> set[str]:
        """The names of all that moves, in a module that calls this one so."""
        return {f"{name}.{part}" for part, _ in self.named_buffers()}

    def add(self, rows: Tensor, labels: Tensor, sign: int = 1) -> None:
        """Counts supports (B, D) of these classes (B,), or with a sign of -1 takes them back."""
        self.sums.index_add_(0, labels, normalize(rows.double(), dim=1), alpha=sign)
        self.counts.index_add_(0, labels, torch.ones_like(labels), alpha=sign)
        touched = labels.unique()
        self.sums[touched] *= (self.counts[touched] > 0)[:, None]  # what rounding leaves would be a direction
        self.directions[touched] = normalize(self.sums[touched], dim=1).to(self.directions.dtype)

    def remove(self, rows: list[Tensor], labels: list[int]) -> None:
        """Takes supports back."""
        if rows:
            self.add(torch.stack(rows), torch.tensor(labels, device=self.sums.device), -1)

    def logits(self, features: Tensor) -> Tensor:
        """The products (B, C) of features, at their own length, with the directions; 0 for a class without supports."""
        return features @ self.directions.T.to(features.dtype)


class T3A(Adapter):
    """Prototypes of the test features with the lowest entropy under the head, and of the head's own rows.

    A batch enters the supports first and is answered then, as in the paper: an answer depends on the rest of its batch.
    With ``keep=None`` nothing is stored but running sums.

    Args:
        keep: how many supports a class keeps, those of lowest entropy; None is all.

    Paper: Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization,
    NeurIPS 2021.

    Differs from the published code: "all" keeps all. There it is written -1, and drops the support of highest entropy
    of every class at every batch, be it the last one (see ``T3APublished``).
    """

    in_paper: ClassVar[str] = "T3A"
    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"keep": (*KEEP, None)}

    def __init__(self, source: Source, *, keep: int | None = 100) -> None:
        super().__init__(source)
        self.prototypes = Prototypes(head_rows(self.model))
        self.supports = None if keep is None else Supports(self.model.classes, keep)
        self._enter(head_rows(self.model))

    def moving(self) -> set[str]:
        """The prototypes."""
        return self.prototypes.moving("prototypes")

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """The softmax of the products of features (B, D) with the prototypes, of which they are part."""
        self._enter(batch)
        return self.prototypes.logits(batch).softmax(1)

    @torch.no_grad()
    def _enter(self, rows: Tensor) -> None:
        labels, entropies = judged(self.model, rows)
        self.prototypes.add(rows, labels)
        if self.supports is not None:
            self.prototypes.remove(*self.supports.add(rows, labels, entropies))


class T3APublished(Adapter):
    """T3A with the "keep all" of its public code, defect included, to compare with published numbers.

    At every batch the support of highest entropy of every class is dropped. A class that gets one row a batch, or less,
    is soon empty, with a logit of 0; in batches of one all are, and the answers uniform. With any other ``keep`` the
    public code is ``T3A``.

    Paper: as of ``T3A``.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.prototypes = Prototypes(head_rows(self.model))
        self.supports = Supports(self.model.classes, None)
        self._enter(head_rows(self.model))

    def moving(self) -> set[str]:
        """The prototypes."""
        return self.prototypes.moving("prototypes")

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """The softmax of the products of features (B, D) with the prototypes, after the worst supports have left."""
        self._enter(batch)
        self.prototypes.remove(*self.supports.shed())
        return self.prototypes.logits(batch).softmax(1)

    @torch.no_grad()
    def _enter(self, rows: Tensor) -> None:
        labels, entropies = judged(self.model, rows)
        self.prototypes.add(rows, labels)
        self.supports.add(rows, labels, entropies)


def head_rows(model: SourceModel) -> Tensor:
    """The head's weights (C, D): the first supports."""
    return cast(nn.Linear, model.head).weight.detach()


def judged(model: SourceModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The class that the head predicts for each row, and the entropy of its prediction."""
    logits: Tensor = model.head(rows)
    return logits.argmax(1), entropy(logits)
