"""AdaNPC: answers by the vote of the bank, and lets confident answers join it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.bank import MemoryBank
from adanpc.core.changes import Append, Change, Judgment, Rollback
from adanpc.core.contents import Contents, State, digest_of, excluded_ids
from adanpc.core.guard import Signs
from adanpc.core.paper import PaperSettings
from adanpc.core.presets import PRESETS, preset_from, preset_of
from adanpc.core.safe import Question, SafeSettings
from adanpc.core.types import Numbers, Origin, Prediction, answered_in_turn
from adanpc.errors import AdaNPCError, LabelError
from adanpc.index import check_features
from adanpc.index.grid import Columns, tensor_of

CHUNK = 128  # queries resolved together by step; a matter of speed, never of the answer


class AdaNPC:
    """An online classifier over a bank. ``predict`` and ``propose`` are pure; ``step`` answers and learns.

    Everything that can alter a later answer changes by ``apply`` alone, so all changes, replayed on an empty
    classifier, give the same one again. Any number of threads may use it at once.

    Args:
        bank: the rows that vote.
        preset: ``paper``: the rule of the paper, in which confident answers join as if they were labels; or ``safe``,
            in which all join with their probabilities, features are transformed to suit the source, and answers fall
            back to the frozen ones where adapting seems to do harm; see ``adanpc.core.safe``. It needs a bank with
            ``soft=True``.
        **options: of the preset. Of ``paper``:

            * k: how many neighbors vote.
            * k_source, k_target: if given, instead of k: that many source rows and that many others (Proposition 3).
            * rule, temperature: the vote rule, see ``vote``.
            * admission: which answers join the bank.
            * centering, prior: see ``Centering``.

            Of ``safe``: stream, transform, screen, guard, balance, carry, home; see ``SafeSettings``.
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
        """How it votes and whom it admits: ``PaperSettings`` of the preset "paper", ``SafeSettings`` of "safe"."""
        return self._preset.settings

    @property
    def preset(self) -> str:
        """The name of the rule by which it learns."""
        return self._preset.name

    @property
    def needs_all_at_once(self) -> bool:
        """Whether source rows must be learned in one call, since a mean or a transform is made of all of them."""
        return self._preset.needs_all_at_once

    @property
    def position(self) -> int:
        """How many changes have been applied."""
        return self.bank.position

    def __repr__(self) -> str:
        return f"<AdaNPC with {self.settings} over {self.bank!r}>"

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to set an option: answers would change without a trace, or not at all."""
        options = [option for preset in PRESETS.values() for option in preset.options]
        if name in options:
            raise AdaNPCError(
                f"{name} of a classifier cannot be changed to {brief(value)}: "
                "make another one over the same bank, AdaNPC(classifier.bank, …)"
            )
        require.known_attribute("a classifier", self, name, "bank", options)
        super().__setattr__(name, value)

    # Answering

    def frozen_queries(self, features: Numbers) -> Tensor:
        """Queries (B, D) as the bank is searched for them before anything has been learned from a stream."""
        return self._preset.frozen_queries(self.bank.contents, self._checked(features))

    def predict(self, features: Numbers, *, exclude: Numbers | None = None) -> Prediction:
        """The answer that each query (B, D) would get if it came next; ``exclude`` as in ``MemoryBank.search``."""
        checked = self._checked(features)
        return self._preset.predict(self.bank.contents, checked, excluded_ids(exclude, len(checked)))

    def propose(
        self, features: Numbers, *, domain: int = -1, keys: Numbers | None = None
    ) -> tuple[Prediction, Append | None]:
        """The answers to queries that arrive in this order, and the change by which the admitted ones join.

        The change is not applied here, though each query sees the earlier ones of the batch that join. Their ids are
        provisional until the change has been applied: ``prediction.settled(first id that apply gave)``.
        """
        checked = self._checked(features)
        answer, change, _ = self._propose(checked, domain, self.checked_keys(keys, len(checked)))
        return answer, change

    def step(self, features: Numbers, *, domain: int = -1, keys: Numbers | None = None) -> Prediction:
        """Answers queries (B, D) in order and learns from each: the same for every way of cutting them into batches."""
        checked = self._checked(features)
        all_keys = self.checked_keys(keys, len(checked))
        answers = []
        with self.bank.writing():
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
        """Those of the queries (B, D) whose labels would say most about whether to adapt; the preset "safe" only.

        No sign tells a stream that should be centered by its whole mean from one of a single class, but a few labels
        do. Show these queries to a person, and ``apply(question.answered(label))``: as soon as one kind of answer leads
        by four labels, it is the one that is given. If one is right in 70 of 100 cases in which only one of them is,
        the other is chosen with a chance of less than 5 %.
        """
        require.whole("most", most, least=1)
        return self._preset.questions(self.bank.contents, self._checked(features), most)

    def signs(self) -> Signs:
        """What the guard of the preset "safe" sees in the stream; its text says it in words."""
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
        """Appends labeled rows (n, D) of the source, or of an expert; their ids."""
        # Not checked by type: an Append says that it holds tensors, and ``apply`` makes them of arrays and lists, too.
        columns: dict[str, Any] = {"features": features, "labels": labels, "domain": domain, "keys": keys}
        return self.apply(Append(origin=origin, who=who, why=why, when=when, **columns))

    def apply(self, change: Change, *, log: Callable[[Change], object] | None = None) -> range:
        """Carries out one change, whole or not at all; the ids that it gave to the rows it appended.

        Args:
            change: what is to happen.
            log: called with the change as the bank takes it, before anybody sees its effect; see ``MemoryBank.apply``.
        """
        with self.bank.writing():
            if isinstance(change, Append) and not change.centered:
                features = self._checked(change.features)
                change = self.bank.with_whole_numbers(change, len(features))
                change = self._preset.prepared(self.bank.contents, change, features)
            return self.bank.apply(change, log=log)

    def rollback(self, earlier: Contents, *, who: str = "", why: str = "", when: float | None = None) -> Rollback:
        """The change that returns to contents that the bank had before: ``earlier = classifier.bank.contents``.

        It is not applied here.
        """
        now = self.bank.contents
        before = earlier.table()
        if now.deleted:  # what was deleted stays deleted
            kept = ~torch.isin(before["id"], torch.tensor(sorted(now.deleted), device=before["id"].device))
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

    # Keeping

    def state(self, *, codes: bool = False) -> State:
        """All of the classifier, its bank included, in plain values; ``AdaNPC.load`` makes it again.

        Args:
            codes: whether to add what the bank's index would otherwise have to derive from the rows once more.
        """
        state = self.bank.contents.state(codes=codes)
        state["document"].update(self._preset.document())
        return state

    @classmethod
    def load(cls, state: State, *, device: torch.device | str = "cpu") -> AdaNPC:
        """The classifier that ``state`` described. Files are checked by ``store`` before they come here."""
        classifier = cls(MemoryBank.load(state, device=device))
        classifier._preset = preset_from(state["document"])
        return classifier

    def digest(self) -> str:
        """A hash of bank, settings and means: classifiers with equal digests give the same answers from then on."""
        return digest_of(self.state())

    # Inside

    def _propose(
        self, features: Tensor, domain: int, keys: Tensor | None
    ) -> tuple[Prediction, Append | None, Tensor | None]:
        """``propose`` for checked features, and what ``unit`` makes of those that the change holds, if it is known."""
        return self._preset.propose(self.bank.contents, self.bank.queue_of, features, domain, keys)

    def _checked(self, features: Numbers) -> Tensor:
        return check_features(features, self.bank.dim).to(self.bank.device)

    def checked_keys(self, given: Any, count: int) -> Tensor | None:
        """The user's own numbers of so many samples (B,), if there are any."""
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
    """Which rows of a table (n,) are missing or other in a later one; both are in the order of ids."""
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
    """The earlier histories of those rows whose history has changed since."""
    histories = {}
    for row in rows:
        history = before.judgments.get(row, ())
        if history != present.judgments.get(row, ()):
            histories[row] = history
    return histories


def replay(changes: Iterable[Change], empty: AdaNPC) -> AdaNPC:
    """The classifier after all changes, applied in order to an empty one with the same settings."""
    for change in changes:
        empty.apply(change)
    return empty
