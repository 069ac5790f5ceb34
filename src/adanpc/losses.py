"""KNNLoss: the paper's training loss, with the same search and vote as at test time."""

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
    """-log of the share that a sample's own class has in the vote of its k nearest rows in a bank (eq. 3).

    It has two modes. In queue mode (Algorithm 1), the bank is a first-in-first-out queue, which ``start`` fills with
    real samples; in training, each ``forward`` computes the loss and then puts the batch into the queue. In EM mode
    (``refresh=n``), the neighbors of each sample are found by ``refresh_neighbors`` and then stay fixed; the training
    loop calls it whenever ``due`` is true.

    Gradients flow through the query and, with ``live_keys``, through every neighbor that is in the same batch.

    Args:
        dim, classes: the length of a feature vector and the number of classes.
        k: how many neighbors vote.
        temperature: how strongly similarity counts; it may be changed at any time and must stay above 0.
        size: the number of rows in the queue.
        refresh: for EM mode, the number of steps after which neighbors should be found again.
        live_keys: whether neighbors in the same batch count with their current features and pass on gradients. In
            queue mode, the batch then enters the queue before its loss is computed in training, so that its samples
            can be each other's neighbors, though never their own.

    Paper: equation 3, Algorithm 1, and the EM procedure of the Methods section.

    Differs from the published code: the queue starts with real samples, not with random rows of class 0; the
    temperature is not tied to 5,000 steps; a batch may be larger than the queue (its last rows stay). As published,
    1e-5 is added to every class, so that a sample without a neighbor of its class has a finite loss; here the sum is
    scaled to 1.
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
        require.positive("temperature", temperature)
        if refresh is not None:
            require.whole("refresh", refresh, least=1)
        self.k = k
        self.temperature = temperature
        self.refresh = refresh
        self.live_keys = live_keys
        self.bank = MemoryBank(dim, classes, capacity=size)
        self.steps = 0  # in EM mode, since the neighbors were last found
        self.fixed: dict[int, list[int]] = {}  # in EM mode, the ids of each sample's neighbors, by the sample's key

    def extra_repr(self) -> str:
        """The arguments, for ``print(model)``."""
        bank = self.bank
        common = f"dim={bank.dim}, classes={bank.classes}, k={self.k}, temperature={self.temperature}"
        return f"{common}, size={bank.capacity}, refresh={self.refresh}, live_keys={self.live_keys}"

    @property
    def due(self) -> bool:
        """Whether EM mode needs a call of ``refresh_neighbors`` before the next step."""
        return self.refresh is not None and (not self.fixed or self.steps >= self.refresh)

    def start(self, features: Tensor, labels: Tensor) -> None:
        """Puts real samples (n, D) into the queue; call it before the first step."""
        self.bank.apply(Append(features, labels, Origin.ADMITTED))

    def refresh_neighbors(self, features: Tensor, labels: Tensor, keys: Tensor) -> None:
        """The E step of EM mode: fills the bank with these samples and finds the neighbors of each among the others.

        Args:
            features: (n, D) the features of all training samples.
            labels: (n,) their labels.
            keys: (n,) numbers by which ``forward`` recognizes the samples, all different.
        """
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
        """The mean loss of a batch.

        Args:
            features: (B, D) the features of the batch.
            labels: (B,) their labels.
            keys: (B,) for EM mode, the numbers of the samples in ``refresh_neighbors``.
        """
        self._check(features, labels, keys)
        features = features.to(self.bank.device)
        labels = labels.to(self.bank.device)
        names = self._names_in_bank(features, labels, keys)
        if self.refresh is None:
            near, places = self._in_queue(features, names)
        else:
            near, places = self._as_fixed(names)
        if (near.ids < 0).all(1).any():
            raise EmptyBankError("a sample has no neighbors: call start(features, labels) with real samples first")
        present = near.ids >= 0
        queries = _directions(features)
        rows = queries.new_zeros(*near.ids.shape, queries.shape[1])
        rows[present] = self.bank.rows(near.ids[present]).to(queries.dtype)
        if self.live_keys:
            rows = torch.where(places[:, :, None] >= 0, queries[places], rows)
        similarity = (queries[:, None] * rows).sum(2).double()  # (B, K), with gradients
        voters = Neighbors(near.ids, similarity.masked_fill(~present, -torch.inf), near.labels)
        probs, _ = vote(voters, self.bank.classes, "published", self.temperature)
        if self.training:
            self.steps += 1
            if self.refresh is None and not self.live_keys:
                self.start(features, labels)
        share_of_label = probs.gather(1, labels.long()[:, None])
        return -share_of_label.log().mean().to(features.dtype)

    def _check(self, features: Tensor, labels: Tensor, keys: Tensor | None) -> None:
        """Raises an error for a batch that has no loss, before anything changes."""
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
        """Raises a LabelError unless there is one whole number for each row."""
        if given.shape != (count,) or given.is_floating_point():
            shape = f"{given.dtype} of shape {tuple(given.shape)}"
            raise LabelError(f"{name} must be whole numbers of shape ({count},), got {shape}")

    def _names_in_bank(self, features: Tensor, labels: Tensor, keys: Tensor | None) -> Tensor:
        """The numbers (B,) by which the bank knows the batch: keys in EM mode, the ids it will get in queue mode.

        In training with live keys, the batch enters the queue here, before the search. Otherwise no row has these ids
        yet, and no neighbor is in the batch.
        """
        if keys is not None and self.refresh is not None:
            return keys.to(self.bank.device)
        first = self.bank.next_id
        if self.live_keys and self.training:
            self.start(features, labels)
        return torch.arange(first, first + len(features), device=self.bank.device)

    def _in_queue(self, features: Tensor, own: Tensor) -> tuple[Neighbors, Tensor]:
        """The neighbors in the queue, and the position in the batch of each (B, K), -1 if it is not in the batch."""
        near = self.bank.search(features, self.k, exclude=own[:, None])
        first = own[0]  # ids rise from here on
        places = torch.where(near.ids >= first, near.ids - first, -1)
        return near, places

    def _as_fixed(self, keys: Tensor) -> tuple[Neighbors, Tensor]:
        """The neighbors that the E step found, and the position in the batch of each (B, K), -1 if it is not in it."""
        try:
            ids = torch.tensor([self.fixed[key] for key in keys.tolist()], device=self.bank.device)
        except KeyError as error:
            raise EmptyBankError(f"no neighbors are known for sample {error}: call refresh_neighbors first") from None
        # Nothing is ever evicted in EM mode, so the n-th row of the table has id n.
        table = self.bank.table("label", "key")
        labels = torch.where(ids >= 0, table["label"][ids], -1)
        same = table["key"][ids][:, :, None] == keys  # (B, K, B)
        places = torch.where(same.any(2), same.long().argmax(2), -1)
        no_similarity = ids.double()  # a placeholder: ``forward`` computes similarities, with gradients
        return Neighbors(ids, no_similarity, labels), places

    def get_extra_state(self) -> dict[str, Any]:
        """The queue, the neighbors and the step, which are all that resuming needs."""
        return {"bank": self.bank.state(), "steps": self.steps, "fixed": self.fixed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continues from what ``get_extra_state`` returned."""
        self.bank = MemoryBank.load(state["bank"], device=self.bank.device)
        self.steps = state["steps"]
        self.fixed = state["fixed"]


def _directions(features: Tensor) -> Tensor:
    """The features scaled to length one, with gradients; in float32, or float64 if they are."""
    if features.dtype != torch.float64:
        features = features.float()
    # Dividing by the largest coordinate first keeps squares from overflowing or vanishing. It is detached, because a
    # direction does not depend on a scale.
    largest = features.detach().abs().amax(1, keepdim=True)
    return normalize(features / largest, dim=1)
