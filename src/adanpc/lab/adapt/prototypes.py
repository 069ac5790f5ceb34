"""T3A: class prototypes made of the features with the most confident predictions."""

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

KEEP = (1, 5, 20, 50, 100)  # the values that T3A and TAST searched, besides keeping all


class Supports(nn.Module):
    """The features that support each class: those whose predictions have the lowest entropies.

    A class with too many drops the feature of highest entropy, of several the latest. Each class is a heap, so a row
    enters or leaves in logarithmic time. It is a module, so that the adapter's ``state_dict`` includes it.

    Args:
        classes: the number of classes.
        keep: how many rows a class may have; None keeps all.
    """

    def __init__(self, classes: int, keep: int | None) -> None:
        super().__init__()
        if keep is not None and keep < 1:
            raise AdaNPCError(f"keep must be at least 1, or None for all, got {keep}")
        self.keep = keep
        self.arrived = 0  # rows added so far
        # Entries are (-entropy, -arrival, row), so the smallest entry of a heap is the row to drop.
        self.heaps: list[list[tuple[float, int, Tensor]]] = [[] for _ in range(classes)]

    def add(self, rows: Tensor, labels: Tensor, entropies: Tensor) -> tuple[list[Tensor], list[int]]:
        """Adds rows (B, D) with their classes and entropies (B,); returns the dropped rows and their classes."""
        dropped_rows = []
        dropped_labels = []
        for row, label, row_entropy in zip(rows, labels.tolist(), entropies.tolist(), strict=True):
            heap = self.heaps[label]
            heappush(heap, (-row_entropy, -self.arrived, row.clone()))  # a view would keep the whole batch alive
            self.arrived += 1
            if self.keep is not None and len(heap) > self.keep:
                _, _, dropped = heappop(heap)
                dropped_rows.append(dropped)
                dropped_labels.append(label)
        return dropped_rows, dropped_labels

    def drop_worst(self) -> tuple[list[Tensor], list[int]]:
        """Drops the row of highest entropy from every class, even its only one; returns the rows and their classes."""
        dropped_rows = []
        dropped_labels = []
        for label, heap in enumerate(self.heaps):
            if heap:
                _, _, dropped = heappop(heap)
                dropped_rows.append(dropped)
                dropped_labels.append(label)
        return dropped_rows, dropped_labels

    def rows(self) -> tuple[Tensor, Tensor]:
        """Returns all rows (N, D) and their classes (N,); there must be at least one."""
        rows = []
        labels = []
        for label, heap in enumerate(self.heaps):
            for _, _, row in heap:
                rows.append(row)
                labels.append(label)
        return torch.stack(rows), torch.tensor(labels, device=rows[0].device)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns all rows with their keys in the heaps, for ``state_dict``."""
        rows = None
        if any(self.heaps):
            rows, _ = self.rows()
        keys = []
        for heap in self.heaps:
            keys.append([(minus_entropy, minus_arrival) for minus_entropy, minus_arrival, _ in heap])
        return {"keys": keys, "rows": rows, "arrived": self.arrived}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``get_extra_state`` returned, for ``load_state_dict``."""
        place = 0  # the number of the next row; rows are in the order of the keys
        self.heaps = []
        for keys in state["keys"]:
            heap = []
            for minus_entropy, minus_arrival in keys:
                heap.append((minus_entropy, minus_arrival, state["rows"][place].clone()))
                place += 1
            heapify(heap)
            self.heaps.append(heap)
        self.arrived = state["arrived"]


class Prototypes(nn.Module):
    """The direction of each class: that of the sum of its supports, each scaled to length 1.

    When supports come or go, only the directions of their classes are computed again.

    Args:
        like: a tensor (C, D) with the dtype and device that the directions should have.
    """

    sums: Tensor  # (C, D), float64
    counts: Tensor  # (C,)
    directions: Tensor  # (C, D)

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        # Supports come and go, and each change rounds: float64 keeps the sums close to what they would be from scratch.
        self.register_buffer("sums", torch.zeros_like(like, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros_like(like[:, 0], dtype=torch.int64))
        self.register_buffer("directions", torch.zeros_like(like))

    def moving(self, name: str) -> set[str]:
        """Returns the names of all buffers, as seen from a module that calls this one ``name``."""
        return {f"{name}.{part}" for part, _ in self.named_buffers()}

    def add(self, rows: Tensor, labels: Tensor, sign: int = 1) -> None:
        """Adds supports (B, D) to these classes (B,); with a sign of -1, removes them."""
        self.sums.index_add_(0, labels, normalize(rows.double(), dim=1), alpha=sign)
        self.counts.index_add_(0, labels, torch.ones_like(labels), alpha=sign)
        touched = labels.unique()
        # Without supports the sum must be 0 exactly: what rounding leaves of it would become a direction.
        self.sums[touched] *= (self.counts[touched] > 0)[:, None]
        self.directions[touched] = normalize(self.sums[touched], dim=1).to(self.directions.dtype)

    def remove(self, rows: list[Tensor], labels: list[int]) -> None:
        """Removes supports; there may be none."""
        if rows:
            self.add(torch.stack(rows), torch.tensor(labels, device=self.sums.device), sign=-1)

    def logits(self, features: Tensor) -> Tensor:
        """Returns the products (B, C) of features, not normalized, with the directions; 0 without supports."""
        return features @ self.directions.T.to(features.dtype)


class T3A(Adapter):
    """Answers with prototypes made of the head's own rows and of the test features it is most confident about.

    A batch joins the supports before it is answered, as in the paper, so an answer depends on the rest of its batch.
    With ``keep=None`` only running sums are stored.

    Paper:
        Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization, NeurIPS
        2021.

    Differs from the published code:
        ``keep=None`` keeps all supports. The published code calls this -1, but drops the support of highest entropy
        from every class at every batch, even the only one (see ``T3APublished``).

    Args:
        keep: how many supports a class keeps, those of lowest entropy; None keeps all.
    """

    in_paper: ClassVar[str] = "T3A"
    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"keep": (*KEEP, None)}

    def __init__(self, source: Source, *, keep: int | None = 100) -> None:
        super().__init__(source)
        self.prototypes = Prototypes(head_rows(self.model))
        self.supports: Supports | None = None
        if keep is not None:
            self.supports = Supports(self.model.classes, keep)
        self._add(head_rows(self.model))

    def moving(self) -> set[str]:
        """Returns the names of the prototypes' tensors."""
        return self.prototypes.moving("prototypes")

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Adds features (B, D) to the supports; returns the softmax (B, C) of the products with the prototypes."""
        self._add(batch)
        return self.prototypes.logits(batch).softmax(1)

    @torch.no_grad()
    def _add(self, rows: Tensor) -> None:
        """Adds rows (B, D) to the supports of the classes that the head predicts for them."""
        labels, entropies = labels_and_entropies(self.model, rows)
        self.prototypes.add(rows, labels)
        if self.supports is not None:
            dropped_rows, dropped_labels = self.supports.add(rows, labels, entropies)
            self.prototypes.remove(dropped_rows, dropped_labels)


class T3APublished(Adapter):
    """T3A with the "keep all" of its public code, including its defect, for comparison with published numbers.

    Every batch drops the support of highest entropy from every class. A class that gets at most one row per batch is
    soon empty, and its logit is 0; in batches of one, all classes become empty and the answers uniform. With any other
    ``keep`` the public code does the same as ``T3A``.

    Paper:
        Iwasawa and Matsuo 2021: see ``T3A``.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.prototypes = Prototypes(head_rows(self.model))
        self.supports = Supports(self.model.classes, keep=None)
        self._add(head_rows(self.model))

    def moving(self) -> set[str]:
        """Returns the names of the prototypes' tensors."""
        return self.prototypes.moving("prototypes")

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Adds features (B, D), drops supports; returns the softmax (B, C) of the products with the prototypes."""
        self._add(batch)
        dropped_rows, dropped_labels = self.supports.drop_worst()
        self.prototypes.remove(dropped_rows, dropped_labels)
        return self.prototypes.logits(batch).softmax(1)

    @torch.no_grad()
    def _add(self, rows: Tensor) -> None:
        """Adds rows (B, D) to the supports of the classes that the head predicts for them."""
        labels, entropies = labels_and_entropies(self.model, rows)
        self.prototypes.add(rows, labels)
        self.supports.add(rows, labels, entropies)


def head_rows(model: SourceModel) -> Tensor:
    """Returns the head's weights (C, D), which are the first supports."""
    return cast(nn.Linear, model.head).weight.detach()


def labels_and_entropies(model: SourceModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the class (B,) that the head predicts for each row (B, D), and the entropy (B,) of the prediction."""
    logits: Tensor = model.head(rows)
    return logits.argmax(1), entropy(logits)
