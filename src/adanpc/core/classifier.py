"""AdaNPC: answers by the vote of the bank, and lets confident answers join it."""

from __future__ import annotations

import torch
from torch import Tensor

from adanpc.core.admission import Admission
from adanpc.core.bank import MemoryBank
from adanpc.core.centring import Centring
from adanpc.core.types import Append, Change, Neighbors, Origin, Prediction
from adanpc.core.vote import vote
from adanpc.errors import AdaNPCError, EmptyBankError
from adanpc.index import check_features, unit

DEFAULT_ADMISSION = Admission(min_confidence=0.9)
CHUNK = 128  # queries resolved together by step; a matter of speed, never of the answer


class AdaNPC:
    """An online classifier over a bank. ``predict`` and ``propose`` are pure; ``step`` answers and learns.

    Args:
        bank: the rows that vote.
        k: how many neighbors vote.
        k_source, k_target: if given, instead of k: that many source rows and that many others (Proposition 3).
        rule, temperature: the vote rule, see ``vote``.
        admission: which answers join the bank.
        centring, prior: see ``Centring``.
    """

    def __init__(
        self,
        bank: MemoryBank,
        *,
        k: int = 10,
        k_source: int | None = None,
        k_target: int | None = None,
        rule: str = "share",
        temperature: float = 0.1,
        admission: Admission = DEFAULT_ADMISSION,
        centring: str = "none",
        prior: int = 16,
    ) -> None:
        if (k_source is None) != (k_target is None):
            raise AdaNPCError("k_source and k_target go together: give both or neither")
        self.bank, self.k, self.k_source, self.k_target = bank, k, k_source, k_target
        self.rule, self.temperature, self.admission = rule, temperature, admission
        self.centring = Centring(bank.dim, centring, prior, bank.device)
        self.pools: list[tuple[int, bool | None]] = [(k, None)]
        if k_source is not None and k_target is not None:
            self.pools = [(k_source, True), (k_target, False)]
        for size, _ in self.pools:
            if size < 1:
                raise AdaNPCError(f"k must be at least 1, got {size}")
        nothing = bank.nearest(torch.zeros(0, bank.dim, device=bank.device), 1)
        vote(nothing, bank.classes, rule, temperature)  # refuses a bad rule or temperature now, not at the first query

    def learn(self, features: Tensor, labels: Tensor, *, domain: Tensor | int = -1, keys: Tensor | None = None) -> None:
        """Appends labelled source rows (n, D)."""
        features = check_features(features, self.bank.dim).to(self.bank.device)
        domains = torch.as_tensor(domain, device=self.bank.device).expand(len(features))
        centred = self.centring.source(features, domains)
        self.apply(Append(centred, labels, Origin.SOURCE, domain=domain, keys=keys))

    def predict(self, features: Tensor, *, exclude: Tensor | None = None) -> Prediction:
        """What each query (B, D) would be answered if it came next; ``exclude`` as in ``MemoryBank.search``."""
        centred, _ = self.centring.queries(self._checked(features), sequence=False)
        queries = unit(centred)
        pools = [self.bank.nearest(queries, k, exclude, source) for k, source in self.pools]
        return self._answer(_join(pools), torch.full((len(queries),), -1, device=self.bank.device))

    def propose(
        self, features: Tensor, *, domain: int = -1, keys: Tensor | None = None
    ) -> tuple[Prediction, Append | None]:
        """The answers to queries that arrive in this order, and the change by which the admitted ones join.

        The change is not applied here, though each query sees the earlier ones of the batch that join.
        """
        centred, stream = self.centring.queries(self._checked(features), sequence=True)
        answer = self._resolve(unit(centred))
        new = answer.joined >= 0
        if not new.any() and stream is None:
            return answer, None
        return answer, Append(
            centred[new],
            answer.labels[new],
            Origin.ADMITTED,
            soft=answer.probs[new] if self.bank.soft else None,
            domain=domain,
            confidence=answer.confidence[new],
            keys=None if keys is None else keys.to(new.device)[new],
            stream=stream,
        )

    def apply(self, change: Change) -> None:
        """Carries out a change on the bank and on the running mean of the stream."""
        self.bank.apply(change)
        if isinstance(change, Append) and change.stream is not None:
            self.centring.total, self.centring.count = change.stream

    def step(self, features: Tensor, *, domain: int = -1, keys: Tensor | None = None) -> Prediction:
        """Answers queries (B, D) in order and learns from each: the same for every way of cutting them into batches."""
        features = self._checked(features)
        answers = []
        for start in range(0, max(len(features), 1), CHUNK):
            part = slice(start, start + CHUNK)
            answer, change = self.propose(features[part], domain=domain, keys=None if keys is None else keys[part])
            if change is not None:
                self.apply(change)
            answers.append(answer)
        if len(answers) == 1:
            return answers[0]
        columns = [[a.probs for a in answers], [a.weights for a in answers], [a.joined for a in answers]]
        probs, weights, joined = (torch.cat(column) for column in columns)
        return Prediction(probs, weights, _join([a.neighbors for a in answers], dim=0), joined)

    def _checked(self, features: Tensor) -> Tensor:
        return check_features(features, self.bank.dim).to(self.bank.device)

    def _answer(self, neighbors: Neighbors, joined: Tensor) -> Prediction:
        if (neighbors.ids < 0).all(1).any():
            raise EmptyBankError("no row of the bank may vote: append source rows first, or restore vetoed ones")
        probs, weights = vote(neighbors, self.bank.classes, self.rule, self.temperature)
        return Prediction(probs.float(), weights.float(), neighbors, joined)

    def _resolve(self, queries: Tensor) -> Prediction:
        """Answers unit queries as if one by one.

        Who joins is guessed (nobody), everything is answered under the guess, and the answers make the next guess,
        until it stands. An answer depends on earlier queries only, so each sweep settles at least one more query, and
        the guess that stands is the sequential result; a few sweeps do.
        """
        bank, batch, device = self.bank, len(queries), self.bank.device
        spare = 0 if bank.capacity is None else min(batch, max(0, int(bank.admitted.sum()) + batch - bank.capacity))
        found = [bank.nearest(queries, k + (0 if source else spare), None, source) for k, source in self.pools]
        gram = queries.double() @ bank.stored(queries).double().T  # (B, B), exact
        turn = torch.arange(batch, device=device)
        joined, labels, probs = torch.full_like(turn, -1), torch.zeros_like(turn), gram.new_zeros(batch, bank.classes)
        while True:
            until, held, gone = self._timeline(joined, labels)
            visible = (turn < turn[:, None]) & (joined >= 0) & (until >= turn[:, None])  # (B, B)
            fresh = Neighbors(
                torch.where(visible, joined, -1),
                gram.masked_fill(~visible, -torch.inf),
                torch.where(visible, labels, -1),
                probs.float().expand(batch, batch, -1) if bank.soft else None,
            )
            pools = [
                _nearest_of(near if source else _join([_without(near, gone), fresh]), k)
                for near, (k, source) in zip(found, self.pools, strict=True)
            ]
            answer = self._answer(_join(pools), joined)
            admitted = self.admission(answer, held)
            ids = torch.where(admitted, bank.next_id + admitted.cumsum(0) - 1, -1)
            settled = torch.equal(ids[:-1], joined[:-1]) and torch.equal(answer.labels[:-1], labels[:-1])
            if settled and (not bank.soft or torch.equal(answer.probs[:-1], probs[:-1])):
                return Prediction(answer.probs, answer.weights, answer.neighbors, ids)
            joined, labels, probs = ids, answer.labels, answer.probs

    def _timeline(self, joined: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
        """What the guess entails: the last turn at which each batch row votes (B,), the admitted rows of each class
        held at each turn (B, C), and the (id, turn) at which rows of the bank leave.
        """
        bank, turns = self.bank, (joined >= 0).nonzero()[:, 0].tolist()
        leaving, _ = bank.plan(labels[turns].tolist())
        until = torch.full_like(joined, len(joined))
        change = torch.zeros(len(joined) + 1, bank.classes, dtype=torch.int64, device=joined.device)
        change[0] = bank.admitted
        gone = []
        change[1:].scatter_add_(1, labels[:, None], (joined >= 0).long()[:, None])
        for turn, (row, label) in zip(turns, leaving, strict=True):
            if row < 0:
                continue
            change[turn + 1, label] -= 1
            if row >= bank.next_id:
                until[turns[row - bank.next_id]] = turn
            else:
                gone.append((row, turn))
        return until, change.cumsum(0)[:-1], gone


def _without(near: Neighbors, gone: list[tuple[int, int]]) -> Neighbors:
    """``near`` with the rows hidden that left the bank before a query's turn."""
    if not gone:
        return near
    rows, turns = torch.tensor(gone, device=near.ids.device).T
    late = torch.arange(len(near.ids), device=near.ids.device)[:, None, None] > turns  # (B, 1, gone)
    hidden = ((near.ids[:, :, None] == rows) & late).any(2)
    return Neighbors(
        near.ids.masked_fill(hidden, -1), near.similarity.masked_fill(hidden, -torch.inf), near.labels, near.soft
    )


def _join(parts: list[Neighbors], dim: int = 1) -> Neighbors:
    """Neighbors side by side (dim 1) or batch after batch (dim 0)."""
    if len(parts) == 1:
        return parts[0]
    soft = [part.soft for part in parts if part.soft is not None]
    return Neighbors(
        torch.cat([part.ids for part in parts], dim),
        torch.cat([part.similarity for part in parts], dim),
        torch.cat([part.labels for part in parts], dim),
        torch.cat(soft, dim) if soft else None,
    )


def _nearest_of(near: Neighbors, k: int) -> Neighbors:
    """The k best of candidates that stand in the order of ids wherever they tie."""
    similarity, order = near.similarity.sort(dim=1, descending=True, stable=True)
    order, similarity = order[:, :k], similarity[:, :k]
    soft = None if near.soft is None else near.soft.gather(1, order[:, :, None].expand(-1, -1, near.soft.shape[2]))
    hidden = similarity.isneginf()
    labels = near.labels.gather(1, order).masked_fill(hidden, -1)
    return Neighbors(near.ids.gather(1, order).masked_fill(hidden, -1), similarity, labels, soft)
