"""AdaNPC: the classifier that answers by a vote of a bank's rows, and adds queries to the bank as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.arrivals import labels_and_domain
from adanpc.core.bank import MemoryBank
from adanpc.core.changes import Append, Change, Judgment, Rollback
from adanpc.core.contents import Contents, State, digest_of, excluded_ids
from adanpc.core.guard import Signs
from adanpc.core.paper import PaperSettings
from adanpc.core.presets import PRESETS, preset_from, preset_of
from adanpc.core.safe import Question, SafeSettings
from adanpc.core.source import Source
from adanpc.core.types import Numbers, Origin, Prediction, answered_in_turn
from adanpc.errors import AdaNPCError, LabelError
from adanpc.index import check_features
from adanpc.index.grid import Columns, tensor_of

CHUNK = 128  # how many queries ``step`` answers together; this affects the speed, never the answers


class AdaNPC:
    """An online classifier over a bank. ``predict`` and ``propose`` change nothing; ``step`` answers and learns.

    Only ``apply`` changes anything that can alter a later answer, so replaying all changes on an empty classifier
    gives the same classifier again. Any number of threads may use it at once.

    Example::

        classifier = AdaNPC(MemoryBank(dim=512, classes=10, soft=True), preset="safe")
        classifier.learn(source_features, source_labels)
        answer = classifier.step(features)  # answers, and learns
        answer.labels

    Args:
        bank: the rows that vote.
        preset: ``paper``, the rule of the paper: confident answers join the bank as if they were labels, wrong ones,
            too, so on data far from the source it may end below a vote that never adapts. Or ``safe``, which
            ``adanpc.wrap`` and the estimator use: all queries join with their probabilities, features are transformed
            to suit the source, and answers fall back to the frozen ones where adapting seems to do harm; see
            ``adanpc.core.safe``. It needs a bank with ``soft=True``.
        **options: options of the preset. For ``paper``:

            * k: how many neighbors vote.
            * k_source, k_target: instead of k, how many source rows and how many other rows vote (Proposition 3).
            * rule, temperature: the vote rule, see ``vote``.
            * admission: which answered queries join the bank, see ``Admission``.
            * centering, prior: see ``Centering``.

            For ``safe``: stream, transform, screen, guard, balance, carry, home; see ``SafeSettings``.
    """

    def __init__(self, bank: MemoryBank, *, preset: str = "paper", **options: Any) -> None:
        if not isinstance(bank, MemoryBank):
            raise AdaNPCError(f"bank must be a MemoryBank such as MemoryBank(dim, classes), got {brief(bank)}")
        self.bank = bank
        self._preset = preset_of(preset, options)
        if self._preset.keeps_probabilities and not bank.soft:
            raise AdaNPCError(f"the preset {preset!r} keeps probabilities in its rows: pass MemoryBank(…, soft=True)")

    @property
    def settings(self) -> PaperSettings | SafeSettings:
        """The options of the preset: ``PaperSettings`` for "paper", ``SafeSettings`` for "safe"."""
        return self._preset.settings

    @property
    def preset(self) -> str:
        """The name of the preset."""
        return self._preset.name

    @property
    def position(self) -> int:
        """How many changes have been applied."""
        return self.bank.position

    def __repr__(self) -> str:
        return f"<AdaNPC with {self.settings} over {self.bank!r}>"

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to assign to an option, which would alter answers without leaving a trace in the log."""
        options: list[str] = []
        for preset in PRESETS.values():
            options += preset.options
        if name in options:
            raise AdaNPCError(
                f"{name} of a classifier cannot be changed to {brief(value)}: "
                "make another one over the same bank, AdaNPC(classifier.bank, …)"
            )
        require.known_attribute("a classifier", self, name, ["bank"], options)
        super().__setattr__(name, value)

    # Answering

    def frozen_queries(self, features: Numbers) -> Tensor:
        """The vectors (B, D) for which the bank would be searched if nothing had been learned from a stream."""
        return self._preset.frozen_queries(self.bank.contents, self._checked(features))

    def predict(self, features: Numbers, *, exclude: Numbers | None = None) -> Prediction:
        """The answer that each query would get if it came next; changes nothing.

        Args:
            features: (B, D) the queries.
            exclude: (B, E) ids of rows that may not vote on that query, such as the query's own row.
        """
        checked = self._checked(features)
        excluded = excluded_ids(exclude, len(checked))
        return self._preset.predict(self.bank.contents, checked, excluded)

    def propose(
        self, features: Numbers, *, domain: int = -1, keys: Numbers | None = None
    ) -> tuple[Prediction, Append | None]:
        """The answers to queries that arrive in this order, and the change that lets the admitted ones join.

        Nothing is changed here; a caller may log the change and then apply it. Even so, each query is answered as if
        the earlier ones had already joined. Their ids are provisional: once ``ids = classifier.apply(change)`` has
        given the final ones, ``prediction.settled(ids.start)`` is the answer with these.

        Args:
            features: (B, D) the queries.
            domain: the domain that the queries come from; -1 if it is unknown.
            keys: (B,) the user's own numbers for the queries.
        """
        checked = self._checked(features)
        answer, change, _ = self._propose(checked, domain, self.checked_keys(keys, len(checked)))
        return answer, change

    def step(self, features: Numbers, *, domain: int = -1, keys: Numbers | None = None) -> Prediction:
        """Answers queries (B, D) in order and learns from each of them; see ``propose`` for the arguments.

        The answers do not depend on how queries are split into batches.
        """
        checked = self._checked(features)
        all_keys = self.checked_keys(keys, len(checked))
        answers = []
        with self.bank.writing():
            # At least one round, so that an empty batch gets an answer, too.
            for start in range(0, max(len(checked), 1), CHUNK):
                part = slice(start, start + CHUNK)
                part_keys = all_keys
                if all_keys is not None:
                    part_keys = all_keys[part]
                answer, change, rows = self._propose(checked[part], domain, part_keys)
                if change is not None:
                    self.bank.apply(change, rows=rows)
                answers.append(answer)
        return answered_in_turn(answers)

    def ask(self, features: Numbers, *, most: int = 10) -> list[Question]:
        """The queries whose labels would tell the most about whether to adapt; for the preset "safe" only.

        Without labels, a stream that should be centered by its whole mean cannot be told from one of a single class;
        a few labels tell them apart. Show these queries to a person, and ``apply(question.answered(label))``. As soon
        as the adapted or the frozen answers lead by four labels, they are the ones that are given. Suppose that one
        kind wins 70 of 100 labels for which the two disagree: then the other is chosen with a chance of less than 5 %.

        Args:
            features: (B, D) the queries to choose from.
            most: the most queries to return.
        """
        require.whole("most", most, least=1)
        return self._preset.questions(self.bank.contents, self._checked(features), most)

    def signs(self) -> Signs:
        """What the guard of the preset "safe" sees in the stream; print it to read it in words."""
        return self._preset.signs(self.bank.contents)

    # Changing

    def learn(
        self,
        features: Numbers,
        labels: Numbers,
        *,
        origin: Origin = Origin.SOURCE,
        domain: Numbers | int = -1,
        keys: Numbers | None = None,
        who: str = "",
        why: str = "",
        when: float | None = None,
    ) -> range:
        """Appends labeled rows of the source, or of an expert, and returns their ids; see ``Append``."""
        # Passed as a dict to quiet the type checker: Append is declared with tensors, but ``apply`` converts arrays
        # and lists, too.
        columns: dict[str, Any] = {"features": features, "labels": labels, "domain": domain, "keys": keys}
        return self.apply(Append(origin=origin, who=who, why=why, when=when, **columns))

    def learn_in_pieces(
        self,
        pieces: Iterable[Tensor],
        labels: Tensor | Sequence[int],
        *,
        domain: Numbers | int = -1,
        keys: Numbers | None = None,
    ) -> range:
        """Appends labeled source rows whose features need not fit into memory, and returns their ids.

        Up to 67 million coordinates, such as 52,000 rows of 1,280, the preset "safe" learns as ``learn`` would. Beyond
        that, it fits its transform to as many coordinates, from rows of each class in each domain, and goes through the
        pieces three times. If this is interrupted, nothing has been learned.

        Args:
            pieces: the features (…, D) in order, some rows at a time: a list of tensors, or anything that can be
                iterated over several times.
            labels, domain, keys: of all n rows; see ``learn``.
        """
        if iter(pieces) is pieces:
            raise AdaNPCError("the pieces must be such that one can go through them several times, not an iterator")
        with self.bank.writing():
            before = self.bank.contents
            try:
                for change in self._in_pieces(pieces, labels, domain, keys):
                    self.apply(change)
            except BaseException:
                self.bank.revert(before)
                raise
            return range(before.next_id, self.bank.next_id)

    def _in_pieces(
        self, pieces: Iterable[Tensor], labels: Tensor | Sequence[int], domain: Numbers | int, keys: Numbers | None
    ) -> Iterator[Append]:
        """The changes that append the rows of ``learn_in_pieces``."""
        count = len(labels)
        device = self.bank.device
        checked_labels, checked_domain = labels_and_domain(labels, domain, count, self.bank.settings, device)
        domains = torch.as_tensor(checked_domain, device=device).expand(count)
        all_keys = self.checked_keys(keys, count)
        if all_keys is None:
            all_keys = torch.full((count,), -1, device=device)
        source = Source(pieces, checked_labels, domains, all_keys)
        yield from self._preset.appending(self.bank.contents, source)

    def apply(self, change: Change, *, log: Callable[[Change], object] | None = None) -> range:
        """Carries out one change, completely or not at all, and returns the ids of the rows that it appended.

        Args:
            change: the change to carry out. The features of an ``Append`` are centered or transformed first, unless it
                says that they have been.
            log: called with the change as the bank carries it out, before anybody sees its effect; see
                ``MemoryBank.apply``.
        """
        with self.bank.writing():
            if isinstance(change, Append) and not change.centered:
                features = self._checked(change.features)
                change = self.bank.with_whole_numbers(change, len(features))
                change = self._preset.prepared(self.bank.contents, change, features)
            return self.bank.apply(change, log=log)

    def rollback(self, earlier: Contents, *, who: str = "", why: str = "", when: float | None = None) -> Rollback:
        """The change that would return the bank to earlier contents, saved as ``earlier = classifier.bank.contents``.

        It is not applied here.
        """
        if not isinstance(earlier, Contents):
            raise AdaNPCError(f"earlier must be contents saved as classifier.bank.contents, got {brief(earlier)}")
        now = self.bank.contents
        before = earlier.table()
        if now.deleted:  # what was deleted stays deleted
            deleted = torch.tensor(sorted(now.deleted), device=before["id"].device)
            kept = ~torch.isin(before["id"], deleted)
            before = {name: column[kept] for name, column in before.items()}
        present = now.table()
        arrived = ~torch.isin(present["id"], before["id"])
        touched = _differing(before, present)
        rows = {name: column[touched] for name, column in before.items()}
        judgments = _differing_histories(earlier, now, before["id"].tolist())
        statistics = earlier.statistics
        return Rollback(
            to=earlier.position,
            at=now.position,
            removed=tuple(present["id"][arrived].tolist()),
            rows=rows,
            judgments=judgments,
            source_mean=statistics.source_mean,
            stream_total=statistics.stream_total,
            stream_count=statistics.stream_count,
            stream=statistics.stream,
            transformed=statistics.transform is not None,
            who=who,
            why=why,
            when=when,
        )

    # Saving and loading

    def state(self, *, codes: bool = False) -> State:
        """The whole classifier and its bank in plain values, from which ``AdaNPC.load`` makes an equal classifier.

        Args:
            codes: True to include what the bank's index would otherwise have to compute from the rows again.
        """
        state = self.bank.contents.state(codes=codes)
        state["document"].update(self._preset.document())
        return state

    @classmethod
    def load(cls, state: State, *, device: torch.device | str = "cpu") -> AdaNPC:
        """The classifier whose ``state`` is given. It is believed: ``store`` checks what comes from a file."""
        classifier = cls(MemoryBank.load(state, device=device))
        classifier._preset = preset_from(state["document"])
        return classifier

    def digest(self) -> str:
        """A hash of bank and settings: classifiers with equal digests give the same answers from then on."""
        return digest_of(self.state())

    # Internals

    def _propose(
        self, features: Tensor, domain: int, keys: Tensor | None
    ) -> tuple[Prediction, Append | None, Tensor | None]:
        """The result of ``propose`` for checked features, and the change's features as ``unit`` normalizes them."""
        domain = self.checked_domain(domain)
        return self._preset.propose(self.bank.contents, self.bank.queue_of, features, domain, keys)

    def _checked(self, features: Numbers) -> Tensor:
        return check_features(features, self.bank.dim).to(self.bank.device)

    @staticmethod
    def checked_domain(given: Any) -> int:
        """The domain of a batch as an int that a bank can store."""
        return require.whole("domain", given, least=-(2**63), most=2**63 - 1)

    def checked_keys(self, given: Any, count: int) -> Tensor | None:
        """The user's own numbers for ``count`` samples as a tensor (count,); None if there are none."""
        if given is None:
            return None
        try:
            keys = tensor_of(given).to(self.bank.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LabelError(f"keys must be whole numbers, one for each sample, got {brief(given)}: {error}") from None
        if keys.shape != (count,):
            raise LabelError(f"keys must have shape ({count},), one for each sample, got {tuple(keys.shape)}")
        if keys.is_floating_point() or keys.is_complex():
            raise LabelError(f"keys must be whole numbers, got {keys.dtype}")
        return keys


def _differing(before: Columns, present: Columns) -> Tensor:
    """Which rows of a table are missing from a later table, or differ from it, (n,) bool; both are ordered by id."""
    kept = torch.isin(before["id"], present["id"])
    differing = ~kept
    places = torch.searchsorted(present["id"], before["id"][kept])
    for name, column in before.items():
        unequal = column[kept] != present[name][places]
        if unequal.ndim > 1:
            unequal = unequal.any(1)
        differing[kept] |= unequal
    return differing


def _differing_histories(before: Contents, present: Contents, rows: list[int]) -> dict[int, tuple[Judgment, ...]]:
    """The earlier histories, by id, of those of the rows whose history has changed since then."""
    histories = {}
    for row in rows:
        history = before.judgments.get(row, ())
        if history != present.judgments.get(row, ()):
            histories[row] = history
    return histories


def replay(changes: Iterable[Change], empty: AdaNPC) -> AdaNPC:
    """The classifier after all changes, which are applied in order to an empty one with the same settings."""
    for change in changes:
        empty.apply(change)
    return empty
