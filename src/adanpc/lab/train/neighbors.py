"""Training with the paper's own loss, for a vote of neighbors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adanpc.core import AdaNPC, MemoryBank, nobody
from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, Sampler
from adanpc.lab.train.search import Choice, Draw
from adanpc.losses import KNNLoss


class KNN(Algorithm):
    """Trains the encoder so that the nearest rows of a sample mostly have its own class; see ``KNNLoss``.

    The head is trained by cross-entropy, but on features without gradient. So the encoder follows the KNN loss alone,
    and there is a head for methods that need one. Runs are judged by the vote of all source rows, not by the head.

    Args:
        k: how many neighbors vote.
        temperature: of the vote.
        anneal: the number of steps over which the temperature falls linearly from 1 to ``temperature``.
        size: the number of rows in the queue.
        refresh: selects EM mode: neighbors are searched among all source samples after every ``refresh`` steps, and
            stay fixed in between. None selects queue mode.
        live_keys: whether gradients also flow through neighbors in the same batch, as in equation 3. In 120 steps on
            digits, the vote on held-out source digits reached 95 % with it, 49 % without, and 68 % after ERM.

    Paper: equation 3, Algorithm 1 and "EM" in the Methods section.

    Differs from the published code: the temperature is constant unless ``anneal`` is given, and never falls below
    ``temperature`` (in the published code it falls from 1 in every training, and is negative from step 5,556 on); the
    queue starts with real samples; no plateau rule changes the learning rate; and gradients flow through the keys of
    the batch (in the published code, through the query alone).
    """

    space: ClassVar[Mapping[str, Draw]] = {
        "k": Choice((5, 10, 20, 50, 100, 150)),
        "size": Choice((500, 1000, 2000, 2500, 3500)),
    }
    photo_settings: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "k": 150, "size": 3500}
    photo_space: ClassVar[Mapping[str, Draw]] = {
        "k": Choice((25, 50, 75, 100, 125, 150, 200, 500)),
        "size": Choice((1000, 1500, 2000, 2500, 3500, 5000)),
    }

    def __init__(
        self,
        model: SourceModel,
        domains: int,
        *,
        k: int = 10,
        temperature: float = 0.1,
        anneal: int = 0,
        size: int = 1000,
        refresh: int | None = None,
        live_keys: bool = True,
        **adam: float,
    ) -> None:
        super().__init__(model, domains, **adam)
        if anneal < 0:
            raise AdaNPCError(f"anneal must be 0 or more steps, got {anneal}")
        self.anneal = anneal
        self.temperature = temperature
        self.knn = KNNLoss(model.dim, model.classes, k=k, size=size, refresh=refresh, live_keys=live_keys)

    def prepare(self, sampler: Sampler) -> None:
        """Fills the queue before the first step; in EM mode, searches the neighbors whenever a search is due."""
        if self.knn.refresh is None and not len(self.knn.bank):
            features, labels, _ = sampler(self.knn.bank.capacity)
            self.knn.start(features, labels)
        elif self.knn.due:
            self.knn.refresh_neighbors(*sampler(None))

    def source_vote(self, sampler: Sampler) -> AdaNPC:
        """Returns the vote of all source rows, with the k and the final temperature of training."""
        features, labels, _ = sampler(None)
        bank = MemoryBank(self.model.dim, self.model.classes)
        classifier = AdaNPC(bank, k=self.knn.k, temperature=self.temperature, admission=nobody)
        classifier.learn(features, labels)
        return classifier

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the encoder's KNN loss plus the head's cross-entropy; no parameter gets gradients of both."""
        labels = torch.cat([batch.labels for batch in batches])
        keys = torch.cat([batch.keys for batch in batches])
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        self.knn.temperature = self.temperature_at(self.step)
        vote = self.knn(features, labels, keys)
        head = cross_entropy(self.model.head(features.detach()), labels)
        return vote + head, {"vote": vote.detach(), "head": head.detach()}

    def temperature_at(self, step: int) -> float:
        """Returns the temperature at a step, which falls from 1 to ``temperature`` and no further."""
        remaining = 0.0  # the share of the way from 1 to ``temperature`` that is still ahead
        if self.anneal:
            remaining = max(0.0, 1 - step / self.anneal)
        return self.temperature + (1 - self.temperature) * remaining
