"""AdaNPC: answers by the vote of the bank, and lets confident answers join it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from adanpc.core.admission import Admission
from adanpc.core.bank import MemoryBank
from adanpc.core.centering import Centering
from adanpc.core.types import Append, Change, Neighbors, Origin, Prediction
from adanpc.core.vote import vote
from adanpc.errors import AdaNPCError, EmptyBankError, LabelError
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
        centering, prior: see ``Centering``.
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
        centering: str = "none",
        prior: int = 16,
    ) -> None:
        if (k_source is None) != (k_target is None):
            raise AdaNPCError("k_source and k_target go together: give both or neither")
        self.bank, self.k, self.k_source, self.k_target = bank, k, k_source, k_target
        self.rule, self.temperature, self.admission = rule, temperature, admission
        self.centering = Centering(bank.dim, centering, prior, bank.device)
        if (fewest := min(size for size, _ in self.pools)) < 1:
            raise AdaNPCError(f"k must be at least 1, got {fewest}")
        self.predict(torch.zeros(0, bank.dim))  # refuses a bad rule or temperature now, not at the first query

    @property
    def pools(self) -> list[tuple[int, bool | None]]:
        """How many rows vote, and from which side: source rows, others, or both (None)."""
        if self.k_source is None or self.k_target is None:
            return [(self.k, None)]
        return [(self.k_source, True), (self.k_target, False)]

    def learn(self, features: Tensor, labels: Tensor, *, domain: Tensor | int = -1, keys: Tensor | None = None) -> None:
        """Appends labeled source rows (n, D)."""
        features = self._checked(features)
        domains = torch.as_tensor(domain, device=self.bank.device).expand(len(features))
        centered, mean = self.centering.source(features, domains)
        self.apply(Append(centered, labels, Origin.SOURCE, domain=domain, keys=keys))
        self.centering.mean = mean

    def predict(self, features: Tensor, *, exclude: Tensor | None = None) -> Prediction:
        """What each query (B, D) would be answered if it came next; ``exclude`` as in ``MemoryBank.search``."""
        centered, _ = self.centering.queries(self._checked(features), sequence=False)
        queries = unit(centered)
        pools = [self.bank.nearest(queries, k, exclude, source) for k, source in self.pools]
        return self._answer(_join(pools))

    def propose(
        self, features: Tensor, *, domain: int = -1, keys: Tensor | None = None
    ) -> tuple[Prediction, Append | None]:
        """The answers to queries that arrive in this order, and the change by which the admitted ones join.

        The change is not applied here, though each query sees the earlier ones of the batch that join.
        """
        return self._propose(self._checked(features, keys), domain, keys)

    def _propose(self, features: Tensor, domain: int, keys: Tensor | None) -> tuple[Prediction, Append | None]:
        centered, stream = self.centering.queries(features, sequence=True)
        answer = self._resolve(unit(centered))
        new = (answer.joined >= 0).nonzero()[:, 0]
        if not len(new) and stream is None:
            return answer, None
        return answer, Append(
            centered[new],
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
            self.centering.total, self.centering.count = change.stream

    def step(self, features: Tensor, *, domain: int = -1, keys: Tensor | None = None) -> Prediction:
        """Answers queries (B, D) in order and learns from each: the same for every way of cutting them into batches."""
        features, answers = self._checked(features, keys), []
        for start in range(0, max(len(features), 1), CHUNK):
            part = slice(start, start + CHUNK)
            answer, change = self._propose(features[part], domain, None if keys is None else keys[part])
            if change is not None:
                self.apply(change)
            answers.append(answer)
        if len(answers) == 1:
            return answers[0]
        columns = zip(*((answer.probs, answer.weights, answer.joined) for answer in answers), strict=True)
        probs, weights, joined = map(torch.cat, columns)
        return Prediction(probs, weights, _join([answer.neighbors for answer in answers], dim=0), joined)

    def _checked(self, features: Tensor, keys: Tensor | None = None) -> Tensor:
        if keys is not None and keys.shape != features.shape[:1]:
            raise LabelError(f"keys must have shape ({len(features)},), one for each query, got {tuple(keys.shape)}")
        return check_features(features, self.bank.dim).to(self.bank.device)

    def _answer(self, neighbors: Neighbors) -> Prediction:
        """The vote of these neighbors, nobody having joined."""
        if (neighbors.ids < 0).all(1).any():
            raise EmptyBankError("no row of the bank may vote: append source rows first, or restore vetoed ones")
        probs, weights = vote(neighbors, self.bank.classes, self.rule, self.temperature)
        return Prediction(probs.float(), weights.float(), neighbors, neighbors.ids.new_full((len(probs),), -1))

    def _resolve(self, queries: Tensor) -> Prediction:
        """Answers unit queries as if one by one.

        Who joins is guessed (nobody), everything is answered under the guess, and the answers make the next guess,
        until it stands. An answer depends on earlier queries only, so each sweep settles at least one more query, and
        the guess that stands is the sequential result; a few sweeps do.
        """
        bank, batch = self.bank, len(queries)
        spare = 0 if bank.capacity is None else min(batch, max(0, int(bank.admitted.sum()) + batch - bank.capacity))
        found = [bank.nearest(queries, k + (0 if source else spare), None, source) for k, source in self.pools]
        first = [_nearest(near, k) if spare else near for near, (k, _) in zip(found, self.pools, strict=True)]
        answer = guess = self._answer(_join(first))
        held, gram = bank.admitted.expand(batch, -1), None
        while True:
            admitted = self.admission(answer, held)
            answer = replace(answer, joined=torch.where(admitted, admitted.cumsum(0) + (bank.next_id - 1), -1))
            if batch < 2 or _same(guess, answer):
                return answer
            if gram is None:
                gram = queries.double() @ bank.stored(queries).double().T  # (B, B), exact
            guess, (held, voters) = answer, self._under(answer, found, gram)
            answer = self._answer(voters)

    def _under(self, guess: Prediction, found: list[Neighbors], gram: Tensor) -> tuple[Tensor, Neighbors]:
        """The admitted rows of each class held at each turn (B, C), and who votes, if the guess were true."""
        until, held, gone = self._timeline(guess.joined, guess.labels)
        turn = torch.arange(len(gram), device=gram.device)
        visible = (turn < turn[:, None]) & (guess.joined >= 0) & (until >= turn[:, None])  # (B, B)
        soft = guess.probs.expand(len(gram), *guess.probs.shape) if self.bank.soft else None
        fresh = Neighbors(guess.joined.expand_as(gram), gram, guess.labels.expand_as(gram), soft).without(~visible)
        with_fresh = [_join([near.without(_gone(near, gone)), fresh]) for near in found]
        sides = zip(found, with_fresh, self.pools, strict=True)
        return held, _join([_nearest(near if source else more, k) for near, more, (k, source) in sides])

    def _timeline(self, joined: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
        """What the guess entails: the last turn at which each batch row votes (B,), the admitted rows of each class
        held at each turn (B, C), and the (id, turn) at which rows of the bank leave.
        """
        bank, turns = self.bank, (joined >= 0).nonzero()[:, 0].tolist()
        leaving = bank.plan(labels[turns].tolist())
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


def _same(one: Prediction, other: Prediction) -> bool:
    """Whether the same queries, but for the last, join with the same answers."""
    new = one.joined[:-1] >= 0
    return torch.equal(one.joined[:-1], other.joined[:-1]) and torch.equal(one.probs[:-1][new], other.probs[:-1][new])


def _gone(near: Neighbors, gone: list[tuple[int, int]]) -> Tensor:
    """Which neighbors left the bank before the query's turn, (B, K)."""
    rows, turns = torch.tensor(gone or [(-2, 0)], device=near.ids.device).T
    late = torch.arange(len(near.ids), device=near.ids.device)[:, None, None] > turns  # (B, 1, gone)
    return torch.any((near.ids[:, :, None] == rows) & late, dim=2)


def _join(parts: list[Neighbors], dim: int = 1) -> Neighbors:
    """Neighbors side by side (dim 1) or batch after batch (dim 0)."""
    if len(parts) == 1:
        return parts[0]
    soft = [part.soft for part in parts if part.soft is not None]
    columns = zip(*((part.ids, part.similarity, part.labels) for part in parts), strict=True)
    ids, similarity, labels = (torch.cat(column, dim) for column in columns)
    return Neighbors(ids, similarity, labels, torch.cat(soft, dim) if soft else None)


def _nearest(near: Neighbors, k: int) -> Neighbors:
    """The k best of candidates that stand in the order of ids wherever they tie."""
    return near.pick(near.similarity.argsort(dim=1, descending=True, stable=True)[:, :k])
