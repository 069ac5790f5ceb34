"""The paper's training loss, over the same search and vote as at test time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from adanpc import require
from adanpc.core import Append, MemoryBank, Neighbors, Origin, vote
from adanpc.errors import AdaNPCError, EmptyBankError, FeatureError, LabelError
from adanpc.index import check_features


@require.names_its_arguments
class KNNLoss(nn.Module):
    """-log of the share that a sample's own class has among its k nearest rows of a bank (eq. 3).

    Queue mode (Algorithm 1): the bank is a first-in-first-out queue that ``start`` fills with real samples; each
    ``forward`` in training mode computes the loss, then puts the batch into the queue. EM mode (``refresh=n``): who is
    a neighbor of whom is found by ``refresh_neighbors`` and then stands still; the loop calls it whenever ``due``.

    Gradients flow through the query and, with ``live_keys``, through every neighbor that is in the same batch.

    Args:
        dim, classes: of features and labels.
        k: how many neighbors vote.
        temperature: scales the influence of similarity; may be set anew at any time, must stay above 0.
        size: rows in the queue.
        refresh: EM mode: after how many steps neighbors are due to be found again.
        live_keys: queue mode, in training: the batch enters the queue first, and its rows answer each other (never
            themselves) with their gradients; EM mode: neighbors that are in the batch enter with their live features.

    Paper: equation 3, Algorithm 1, and the EM procedure of the Methods section.

    Differs from the published code: the queue starts with real samples, not random rows of class 0; the temperature
    is not tied to 5,000 steps; a batch larger than the queue is defined (its last rows stay). As published, 1e-5 is
    added to every class, so that a sample with no neighbor of its class has a finite loss; here the sum is scaled to 1.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        k: int = 10,
        temperature: float = 0.1,
        size: int = 1000,
        refresh: int | None = None,
        live_keys: bool = False,
    ) -> None:
        super().__init__()
        require.whole("k", k, least=1)
        if refresh is not None:
            require.whole("refresh", refresh, least=1)
        self.k = k
        self.temperature = temperature
        self.refresh = refresh
        self.live_keys = live_keys
        self.bank = MemoryBank(dim, classes, capacity=size)
        self.steps = 0
        self.fixed: dict[int, list[int]] = {}  # EM mode: the neighbors of each sample's key

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        size = f"size={self.bank.capacity}, refresh={self.refresh}, live_keys={self.live_keys}"
        return f"dim={self.bank.dim}, classes={self.bank.classes}, k={self.k}, temperature={self.temperature}, {size}"

    @property
    def due(self) -> bool:
        """Whether EM mode asks for ``refresh_neighbors`` before the next step."""
        return self.refresh is not None and (not self.fixed or self.steps >= self.refresh)

    def start(self, features: Tensor, labels: Tensor) -> None:
        """Puts real samples (n, D) into the queue before the first step."""
        self.bank.apply(Append(features, labels, Origin.ADMITTED))

    def refresh_neighbors(self, features: Tensor, labels: Tensor, keys: Tensor) -> None:
        """EM mode, the E step: makes these samples the bank and fixes each one's neighbors, itself left out."""
        if len(keys.unique()) != len(keys):
            raise AdaNPCError("keys must differ from sample to sample, or a sample would be its own neighbor")
        bank = MemoryBank(self.bank.dim, self.bank.classes, capacity=self.bank.capacity, device=self.bank.device)
        bank.apply(Append(features, labels, Origin.SOURCE, keys=keys))
        own = torch.arange(len(features), device=bank.device)[:, None]
        near = bank.search(features, self.k, exclude=own).ids
        self.bank = bank
        self.fixed = dict(zip(keys.tolist(), near.tolist(), strict=True))
        self.steps = 0

    def forward(self, features: Tensor, labels: Tensor, keys: Tensor | None = None) -> Tensor:
        """The mean loss of a batch (B, D); ``keys`` (B,) name the samples in EM mode."""
        self._check(features, labels, keys)
        features = features.to(self.bank.device)
        labels = labels.to(self.bank.device)
        live = self._live(features, labels, keys)
        if self.refresh is None:
            near, places = self._in_queue(features, live)
        else:
            near, places = self._as_fixed(live)
        if (near.ids < 0).all(1).any():
            raise EmptyBankError("a sample has no neighbors: call start(features, labels) with real samples first")
        present = near.ids >= 0
        queries = _directions(features)
        rows = queries.new_zeros(*near.ids.shape, queries.shape[1])
        rows[present] = self.bank.rows(near.ids[present]).to(queries.dtype)
        if self.live_keys:
            rows = torch.where(places[:, :, None] >= 0, queries[places], rows)
        similarity = (queries[:, None] * rows).sum(2).double().masked_fill(~present, -torch.inf)
        probs, _ = vote(Neighbors(near.ids, similarity, near.labels), self.bank.classes, "published", self.temperature)
        if self.training:
            self.steps += 1
            if self.refresh is None and not self.live_keys:
                self.start(features, labels)
        return -probs.gather(1, labels.long()[:, None]).log().mean().to(features.dtype)

    def _check(self, features: Tensor, labels: Tensor, keys: Tensor | None) -> None:
        """Refuses a batch that has no loss, before anything changes."""
        if not len(features):
            raise FeatureError("the batch is empty: a loss needs at least one row")
        if not features.is_floating_point():
            raise FeatureError(f"features must be floating-point, for gradients, got {features.dtype}")
        check_features(features, self.bank.dim)
        self._check_column("labels", labels, len(features))
        if keys is not None:
            self._check_column("keys", keys, len(features))
        if not 0 <= int(labels.min()) <= int(labels.max()) < self.bank.classes:
            raise LabelError(f"labels must be between 0 and {self.bank.classes - 1}, got {labels.tolist()[:5]}, …")
        if self.refresh is not None and keys is None:
            raise AdaNPCError("EM mode needs keys: forward(features, labels, keys)")

    @staticmethod
    def _check_column(name: str, given: Tensor, count: int) -> None:
        if given.shape != (count,) or given.is_floating_point():
            shape = f"{given.dtype} of shape {tuple(given.shape)}"
            raise LabelError(f"{name} must be whole numbers of shape ({count},), got {shape}")

    def _live(self, features: Tensor, labels: Tensor, keys: Tensor | None) -> Tensor:
        """Names the batch in the bank: in EM mode by its keys, in queue mode by the ids with which it enters (B,).

        Only training with live keys puts the batch into the queue before the search; else no row has these ids yet.
        """
        if keys is not None and self.refresh is not None:
            return keys.to(self.bank.device)
        first = self.bank.next_id
        if self.live_keys and self.training:
            self.start(features, labels)
        return torch.arange(first, first + len(features), device=self.bank.device)

    def _in_queue(self, features: Tensor, own: Tensor) -> tuple[Neighbors, Tensor]:
        """The neighbors in the queue, and the batch position of each that is live, else -1."""
        near = self.bank.search(features, self.k, exclude=own[:, None])
        return near, torch.where(near.ids >= own[0], near.ids - own[0], -1)

    def _as_fixed(self, keys: Tensor) -> tuple[Neighbors, Tensor]:
        """The neighbors that the E step found, and the batch position of each that is live, else -1."""
        try:
            ids = torch.tensor([self.fixed[key] for key in keys.tolist()], device=self.bank.device)
        except KeyError as error:
            raise EmptyBankError(f"no neighbors are known for sample {error}: call refresh_neighbors first") from None
        # Nothing is ever evicted in EM mode, so the n-th row of the table has id n.
        table = self.bank.table("label", "key")
        labels = torch.where(ids >= 0, table["label"][ids], -1)
        same = table["key"][ids][:, :, None] == keys  # (B, K, B)
        places = torch.where(same.any(2), same.long().argmax(2), -1)
        return Neighbors(ids, ids.double(), labels), places  # similarities are computed anew, with gradients

    def get_extra_state(self) -> dict[str, Any]:
        """The queue, the neighbors and the step: all that resuming needs."""
        return {"bank": self.bank.state(), "steps": self.steps, "fixed": self.fixed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes up where ``get_extra_state`` left off."""
        self.bank = MemoryBank.load(state["bank"], device=self.bank.device)
        self.steps = state["steps"]
        self.fixed = state["fixed"]


def _directions(features: Tensor) -> Tensor:
    """Features at length one, with gradients; half precision is widened, and no magnitude is too large or small."""
    if features.dtype != torch.float64:
        features = features.float()
    # The scale carries no gradient: a direction does not depend on it.
    return normalize(features / features.detach().abs().amax(1, keepdim=True), dim=1)
