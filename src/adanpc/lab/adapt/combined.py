"""AdaNPC over an encoder that Tent or ETA adapts."""

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
from adanpc.lab.adapt.tent import Tent

ROWS = 64  # source images encoded at once; where layers use the statistics of the batch, the features depend on it


class Combined(Adapter, ABC):
    """A gradient method moves the encoder by the head's answers; a bank answers, from the features of the same pass.

    Rows of the bank are features of the encoder as it was when they came: source rows of the source model, admitted
    rows of the moment. As the encoder moves they grow stale, and nothing corrects that unless ``refresh`` is given:
    then all source rows are made anew by the current encoder before the first batch and after every so many. Admitted
    rows stay as they are, since their images are not kept.

    Args:
        mover: moves the encoder.
        k, temperature: of the vote.
        min_confidence: an answer joins the bank if its probability is at least this.
        refresh: batches between two renewals of the source rows; None: never.
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
            refresh = None  # rows of the head are the same, however the encoder moves
        if refresh is not None and source.images is None:
            raise AdaNPCError("refresh encodes source images again: give Source(images=…), or leave refresh out")
        self.mover = mover
        self.source = source
        self.refresh = refresh
        self.batches = 0  # that have been met
        del self.model
        # Not as a submodule: the mover has registered it already, and the state dict must hold it once.
        self.__dict__["model"] = mover.model
        bank = MemoryBank(self.model.dim, self.model.classes, device=self.model.device)
        admission = Admission(min_confidence=min_confidence)
        self.classifier = core.AdaNPC(bank, k=k, temperature=temperature, admission=admission)
        self.classifier.learn(source.features, source.labels)
        self.banks["bank"] = bank

    def moving(self) -> set[str]:
        """What the mover moves; the bank is beside the tensors."""
        return {f"mover.{name}" for name in self.mover.moving()}

    def answer(self, batch: Tensor) -> Tensor:
        """The vote on images (B, …) as the encoder sees them before it moves."""
        if self.refresh is not None and self.batches % self.refresh == 0:
            self._renew()
        with torch.enable_grad():
            features = self.model.features(batch)
            self.mover.learn(batch, self.model.head(features))
        self.batches += 1
        return self.classifier.step(features.detach()).probs.to(batch.dtype)

    def _renew(self) -> None:
        """Makes all source rows anew; admitted rows follow them, as they were."""
        old = self.classifier.bank
        table = old.table("id", "label", "origin", "confidence")
        admitted = table["origin"] == Origin.ADMITTED
        renewed = MemoryBank(**old.config(), device=old.device)
        renewed.apply(Append(self._encoded_source(), self.source.labels, Origin.SOURCE))
        if admitted.any():
            rows = old.rows(table["id"][admitted])
            labels = table["label"][admitted]
            renewed.apply(Append(rows, labels, Origin.ADMITTED, confidence=table["confidence"][admitted]))
        old.revert(renewed.contents)  # the bank stays the same object, which the classifier holds, too

    def _encoded_source(self) -> Tensor:
        """The features (n, D) of all source images by the encoder as it is now."""
        assert self.source.images is not None
        order = self.source.mixed()
        parts = []
        with torch.no_grad():
            for rows in order.split(ROWS):
                images = self.source.images(rows).to(self.model.device)
                parts.append(self.model.features(images))
        return torch.cat(parts)[order.argsort()]

    def extra(self) -> dict[str, Any]:
        """How many batches have been met."""
        return {"batches": self.batches}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the number of batches back."""
        self.batches = extra["batches"]


class AdaNPCTent(Combined):
    """AdaNPC on an encoder that Tent moves; see ``Combined`` for what becomes of stale rows.

    Paper: Table "ImageNet-C", rows "+ AdaNPC"; it says no more than that both are used.

    Args:
        k, temperature, min_confidence, refresh: see ``Combined``.
        alpha, optimizer: of ``Tent``.
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
    """AdaNPC on an encoder that ETA moves; see ``Combined`` for what becomes of stale rows.

    Paper: Table "ImageNet-C", rows "+ AdaNPC"; it says no more than that both are used.

    Args:
        k, temperature, min_confidence, refresh: see ``Combined``.
        lr, optimizer: of ``ETA``.
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
