"""AdaNPC on an encoder that Tent or ETA adapts."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from adanpc import core
from adanpc.core import Admission, Append, MemoryBank, Origin
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.bank import KS
from adanpc.lab.adapt.entropy import EntropyDescent
from adanpc.lab.adapt.filtered import ETA, GRID
from adanpc.lab.adapt.statistics import statistics_used
from adanpc.lab.adapt.tent import Tent
from adanpc.lab.networks.features import identity

ROWS = 64  # source images encoded at once; layers that use batch statistics make the features depend on it
# The source rows that were last computed before a stream, under what they depend on. The streams of a table often begin
# with the same model, and encoding a large source takes longer than most streams.
_AT_START: dict[str, Tensor] = {}


class Combined(Adapter, ABC):
    """AdaNPC on top of a gradient method: that method trains the encoder, and a bank of its features answers.

    The gradient method, called the mover, learns from the head's logits; the bank answers from the features of the
    same forward pass. A row of the bank is a feature by the encoder as it was when the row was added: source rows by
    the source model, admitted rows by the encoder of their time. As the encoder changes, rows become stale. Nothing
    corrects that unless ``refresh`` is given: then the current encoder computes all source rows again, before the first
    batch and after every ``refresh`` batches. Admitted rows are never computed again, since their images are not kept.

    Args:
        mover: the method that trains the encoder.
        k: how many rows vote.
        temperature: of the vote.
        min_confidence: an answer joins the bank if its probability is at least this.
        refresh: the number of batches between two computations of the source rows; None never repeats them.
    """

    def __init__(
        self,
        source: Source,
        mover: EntropyDescent,
        *,
        k: int,
        temperature: float,
        min_confidence: float,
        refresh: int | None,
    ) -> None:
        super().__init__(source)
        if refresh is not None and refresh < 1:
            raise AdaNPCError(f"refresh must be at least 1 batch, got {refresh}")
        if source.prototypes:
            refresh = None  # the source rows are not computed by the encoder, so they cannot become stale
        if refresh is not None and source.images is None:
            raise AdaNPCError("refresh encodes source images again: give Source(images=…), or leave refresh out")
        self.mover = mover
        self.source = source
        self.refresh = refresh
        self.batches = 0  # answered so far
        # The source rows as they were last computed, and the tensors of the model that computed them. Not saved, since
        # they can be computed again at any time.
        self._computed: tuple[list[Tensor], Tensor] | None = None
        del self.model
        # Not registered as a submodule: it already is one of the mover, and the state dict must hold it once.
        self.__dict__["model"] = mover.model
        bank = MemoryBank(self.model.dim, self.model.classes, device=self.model.device)
        admission = Admission(min_confidence=min_confidence)
        self.classifier = core.AdaNPC(bank, k=k, temperature=temperature, admission=admission)
        self.classifier.learn(source.features, source.labels)
        self.banks["bank"] = bank

    def moving(self) -> set[str]:
        """Returns the names of what the mover changes; the bank is saved separately."""
        return {f"mover.{name}" for name in self.mover.moving()}

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C) on images (B, …), encoded before the mover learns from them."""
        if self.refresh is not None and self.batches % self.refresh == 0:
            self._refresh_source_rows()
        with torch.enable_grad():
            features = self.model.features(batch)
            self.mover.learn(batch, self.model.head(features))
        self.batches += 1
        # The mover has just learned from the batch, but these features are from before: one pass serves both.
        return self.classifier.step(features.detach()).probs.to(batch.dtype)

    def _refresh_source_rows(self) -> None:
        """Replaces all source rows by features of the current encoder; admitted rows stay as they were."""
        bank = self.classifier.bank
        table = bank.table("id", "label", "origin", "confidence")
        admitted = table["origin"] == Origin.ADMITTED
        refreshed = MemoryBank(**bank.config(), device=bank.device)
        refreshed.apply(Append(self._current_source_rows(), self.source.labels, Origin.SOURCE))
        if admitted.any():
            rows = bank.rows(table["id"][admitted])
            labels = table["label"][admitted]
            refreshed.apply(Append(rows, labels, Origin.ADMITTED, confidence=table["confidence"][admitted]))
        bank.revert(refreshed.contents)  # the classifier holds the bank, so the object must stay the same

    def _current_source_rows(self) -> Tensor:
        """Returns the source rows (n, D) by the encoder as it is now, computed again only if the model has changed.

        Each ``predict`` before the first batch needs them, and all of these meet the same model.
        """
        now = [*self.model.parameters(), *self.model.buffers()]
        if self._computed is not None:
            earlier, rows = self._computed
            if all(map(torch.equal, earlier, now)):
                return rows
        rows = self._shared_or_encoded_source()
        self._computed = ([tensor.detach().clone() for tensor in now], rows)
        return rows

    def _shared_or_encoded_source(self) -> Tensor:
        """Returns the source rows (n, D), shared with other streams that begin with the same model and samples."""
        if self.batches > 0 or not self.source.images_digest:
            return self._encoded_source()
        key = f"{self.source.images_digest} {identity(self.model)} {statistics_used(self.model)}"
        rows = _AT_START.get(key)
        if rows is None:
            rows = self._encoded_source()
            _AT_START.clear()  # the rows of one source are enough, since its streams are run one after another
            _AT_START[key] = rows
        return rows

    def _encoded_source(self) -> Tensor:
        """Returns the features (n, D) of all source images by the encoder as it is now."""
        assert self.source.images is not None
        order = self.source.mixed()  # batches of mixed classes, for layers that use batch statistics
        parts = []
        with torch.no_grad():
            for rows in order.split(ROWS):
                images = self.source.images(rows).to(self.model.device)
                parts.append(self.model.features(images))
        return torch.cat(parts)[order.argsort()]

    def extra(self) -> dict[str, Any]:
        """Returns the number of batches answered so far."""
        return {"batches": self.batches}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the number of batches back."""
        self.batches = extra["batches"]


class AdaNPCTent(Combined):
    """AdaNPC on an encoder that Tent adapts; see ``Combined`` for how stale rows are handled.

    Paper: Table "ImageNet-C", rows "+ AdaNPC"; it says no more than that both are used.

    Args:
        k, temperature, min_confidence, refresh: see ``Combined``.
        alpha, optimizer: see ``Tent``.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"k": KS, "alpha": (0.1, 1.0, 10.0)}

    def __init__(
        self,
        source: Source,
        *,
        k: int = 10,
        temperature: float = 0.1,
        min_confidence: float = 0.9,
        refresh: int | None = None,
        alpha: float = 1.0,
        optimizer: str = "adam",
    ) -> None:
        mover = Tent(source, alpha=alpha, optimizer=optimizer)
        super().__init__(source, mover, k=k, temperature=temperature, min_confidence=min_confidence, refresh=refresh)


class AdaNPCETA(Combined):
    """AdaNPC on an encoder that ETA adapts; see ``Combined`` for how stale rows are handled.

    Paper: Table "ImageNet-C", rows "+ AdaNPC"; it says no more than that both are used.

    Args:
        k, temperature, min_confidence, refresh: see ``Combined``.
        lr, optimizer: see ``ETA``.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"k": KS, "lr": GRID["lr"]}

    def __init__(
        self,
        source: Source,
        *,
        k: int = 10,
        temperature: float = 0.1,
        min_confidence: float = 0.9,
        refresh: int | None = None,
        lr: float | None = None,
        optimizer: str = "sgd",
    ) -> None:
        mover = ETA(source, lr=lr, optimizer=optimizer)
        super().__init__(source, mover, k=k, temperature=temperature, min_confidence=min_confidence, refresh=refresh)
