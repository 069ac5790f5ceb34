"""AdaNPC: answers by the vote of the bank, and lets confident answers join it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adanpc import require
from adanpc.core import safe
from adanpc.core.admission import Admission
from adanpc.core.bank import MemoryBank
from adanpc.core.centering import Centering
from adanpc.core.changes import Append, Change, Rollback
from adanpc.core.contents import WIDEST, Contents, State, digest_of
from adanpc.core.safe import SafeSettings
from adanpc.core.sequence import Pool, resolve
from adanpc.core.types import Neighbors, Origin, Prediction, answered_in_turn, side_by_side
from adanpc.core.vote import check_vote_settings, vote
from adanpc.errors import AdaNPCError, EmptyBankError, LabelError
from adanpc.index import check_features, unit
from adanpc.index.grid import Columns
from adanpc.require import did_you_mean

DEFAULT_ADMISSION = Admission(min_confidence=0.9)
NO_CENTERING = Centering()
PRESETS = {  # and their options
    "paper": ("k", "k_source", "k_target", "rule", "temperature", "admission", "centering", "prior"),
    "safe": ("stream", "guard", "balance"),
}
CHUNK = 128  # queries resolved together by step; a matter of speed, never of the answer


@dataclass(frozen=True)
class Settings:
    """How a classifier with the preset "paper" votes and whom it admits; see ``AdaNPC``."""

    k: int = 10
    k_source: int | None = None
    k_target: int | None = None
    rule: str = "share"
    temperature: float = 0.1
    admission: Admission = DEFAULT_ADMISSION
    centering: Centering = NO_CENTERING

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", require.whole("k", self.k, least=1, most=WIDEST))
        if (self.k_source is None) != (self.k_target is None):
            raise AdaNPCError("k_source and k_target go together: give both or neither")
        for name in ("k_source", "k_target"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require.whole(name, getattr(self, name), least=1, most=WIDEST))
        check_vote_settings(self.rule, self.temperature)
        object.__setattr__(self, "temperature", float(self.temperature))
        if not isinstance(self.centering, Centering):
            raise AdaNPCError(f"centering must be a Centering such as Centering('stream'), got {self.centering!r}")
        if not isinstance(self.admission, Admission):
            raise AdaNPCError(
                f"admission must be an Admission such as Admission(min_confidence=0.9), got {self.admission!r}"
            )

    @property
    def pools(self) -> list[Pool]:
        """How many rows vote, and from which side: source rows, others, or both (None)."""
        if self.k_source is None or self.k_target is None:
            return [(self.k, None)]
        return [(self.k_source, True), (self.k_target, False)]


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

            Of ``safe``: stream, guard, balance; see ``SafeSettings``.
    """

    def __init__(self, bank: MemoryBank, *, preset: str = "paper", **options: Any) -> None:
        self.bank = bank
        self._settings: Settings | SafeSettings = settings_of(preset, options)
        if isinstance(self._settings, SafeSettings) and not bank.soft:
            raise AdaNPCError("the preset 'safe' keeps probabilities in its rows: give MemoryBank(…, soft=True)")

    @property
    def settings(self) -> Any:
        """How it votes and whom it admits: ``Settings`` of the preset "paper", ``SafeSettings`` of "safe"."""
        return self._settings

    @property
    def preset(self) -> str:
        """The name of the rule by which it learns."""
        return "safe" if isinstance(self._settings, SafeSettings) else "paper"

    @property
    def needs_all_at_once(self) -> bool:
        """Whether source rows must be learned in one call, since a mean or a transform is made of all of them."""
        return isinstance(self._settings, SafeSettings) or self._settings.centering.mode != "none"

    @property
    def position(self) -> int:
        """How many changes have been applied."""
        return self.bank.position

    def __repr__(self) -> str:
        return f"<AdaNPC with {self._settings} over {self.bank!r}>"

    # Answering

    def frozen_queries(self, features: Tensor) -> Tensor:
        """Queries (B, D) as the bank is searched for them before anything has been learned from a stream."""
        contents = self.bank.contents
        checked = self._checked(features)
        if isinstance(self._settings, SafeSettings):
            return safe.still(contents, checked)
        return self._settings.centering.queries(checked, contents.statistics, sequence=False)[0]

    def predict(self, features: Tensor, *, exclude: Tensor | None = None) -> Prediction:
        """What each query (B, D) would be answered if it came next; ``exclude`` as in ``MemoryBank.search``."""
        contents = self.bank.contents
        settings = self._settings
        checked = self._checked(features)
        if isinstance(settings, SafeSettings):
            return safe.predict(contents, checked, settings, exclude)
        centered, _ = settings.centering.queries(checked, contents.statistics, sequence=False)
        queries = unit(centered)
        voters = [contents.nearest(queries, k, exclude, source) for k, source in settings.pools]
        return self._answer(side_by_side(voters), settings)

    def propose(
        self, features: Tensor, *, domain: int = -1, keys: Tensor | None = None
    ) -> tuple[Prediction, Append | None]:
        """The answers to queries that arrive in this order, and the change by which the admitted ones join.

        The change is not applied here, though each query sees the earlier ones of the batch that join. Their ids are
        provisional until the change has been applied: ``prediction.settled(first id that apply gave)``.
        """
        checked = self._checked(features)
        return self._propose(checked, domain, self._checked_keys(keys, len(checked)))

    def step(self, features: Tensor, *, domain: int = -1, keys: Tensor | None = None) -> Prediction:
        """Answers queries (B, D) in order and learns from each: the same for every way of cutting them into batches."""
        checked = self._checked(features)
        all_keys = self._checked_keys(keys, len(checked))
        answers = []
        with self.bank.writing():
            for start in range(0, max(len(checked), 1), CHUNK):
                part = slice(start, start + CHUNK)
                part_keys = None if all_keys is None else all_keys[part]
                answer, change = self._propose(checked[part], domain, part_keys)
                if change is not None:
                    self.bank.apply(change)
                answers.append(answer)
        return answered_in_turn(answers)

    # Changing

    def learn(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        origin: Origin = Origin.SOURCE,
        domain: Tensor | int = -1,
        keys: Tensor | None = None,
        who: str = "",
        why: str = "",
        when: float | None = None,
    ) -> range:
        """Appends labeled rows (n, D) of the source, or of an expert; their ids."""
        return self.apply(Append(features, labels, origin, domain=domain, keys=keys, who=who, why=why, when=when))

    def apply(self, change: Change) -> range:
        """Carries out one change, whole or not at all; the ids that it gave to the rows it appended."""
        with self.bank.writing():
            if isinstance(change, Append) and not change.centered:
                features = self._checked(change.features)
                change = self._prepared(change, features)
            return self.bank.apply(change)

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
        judgments = {}
        for row in before["id"].tolist():
            history = earlier.judgments.get(row, ())
            if history != now.judgments.get(row, ()):
                judgments[row] = history
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

    def state(self) -> State:
        """All of the classifier, its bank included, in plain values; ``AdaNPC.load`` makes it again."""
        state = self.bank.state()
        settings = self._settings
        document = state["document"]
        if isinstance(settings, SafeSettings):
            document["safe"] = asdict(settings)
            return state
        document["classifier"] = {
            "k": settings.k,
            "k_source": settings.k_source,
            "k_target": settings.k_target,
            "rule": settings.rule,
            "temperature": settings.temperature,
        }
        document["admission"] = {name: _plain(value) for name, value in asdict(settings.admission).items()}
        document["centering"] = asdict(settings.centering)
        return state

    @classmethod
    def load(cls, state: State, *, device: torch.device | str = "cpu") -> AdaNPC:
        """The classifier that ``state`` described. Files are checked by ``store`` before they come here."""
        classifier = cls(MemoryBank.load(state, device=device))
        classifier._settings = settings_from(state["document"])
        return classifier

    def digest(self) -> str:
        """A hash of bank, settings and means: classifiers with equal digests answer alike for ever after."""
        return digest_of(self.state())

    # Inside

    def _prepared(self, change: Append, features: Tensor) -> Append:
        """The change with its checked features as the bank is to store them."""
        contents = self.bank.contents
        if isinstance(self._settings, SafeSettings):
            return safe.prepared(change, features, contents, self._settings)
        return self._settings.centering.prepared(change, features, contents.statistics)

    def _propose(self, features: Tensor, domain: int, keys: Tensor | None) -> tuple[Prediction, Append | None]:
        """``propose`` for checked features."""
        contents = self.bank.contents
        settings = self._settings
        if isinstance(settings, SafeSettings):
            queue = self.bank.queue_of(contents)
            prediction, change = safe.propose(contents, queue, features, settings)
            if change is not None:
                change = replace(change, domain=domain, keys=keys)
            return prediction, change
        centered, observed = settings.centering.queries(features, contents.statistics, sequence=True)
        queue = self.bank.queue_of(contents) if contents.settings.capacity is not None else None
        answers = partial(self._answer, settings=settings)
        answer = resolve(contents, queue, unit(centered), settings.pools, answers, settings.admission)
        new = (answer.joined >= 0).nonzero()[:, 0]
        if not len(new) and observed is None:
            return answer, None
        return answer, Append(
            centered[new],
            answer.labels[new],
            Origin.ADMITTED,
            soft=answer.probs[new] if contents.settings.soft else None,
            domain=domain,
            confidence=answer.confidence[new],
            keys=None if keys is None else keys[new],
            centered=True,
            observed=observed,
        )

    def _checked(self, features: Tensor) -> Tensor:
        return check_features(features, self.bank.dim).to(self.bank.device)

    def _checked_keys(self, given: Any, count: int) -> Tensor | None:
        """The user's own numbers of so many queries (B,), if there are any."""
        if given is None:
            return None
        try:
            keys = torch.as_tensor(given, device=self.bank.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LabelError(f"keys must be whole numbers, one for each query: {error}") from None
        if keys.shape != (count,):
            raise LabelError(f"keys must have shape ({count},), one for each query, got {tuple(keys.shape)}")
        if keys.is_floating_point() or keys.is_complex():
            raise LabelError(f"keys must be whole numbers, got {keys.dtype}")
        return keys

    def _answer(self, neighbors: Neighbors, settings: Settings) -> Prediction:
        """The vote of these neighbors; no query has joined."""
        if (neighbors.ids < 0).all(1).any():
            raise EmptyBankError("no row of the bank may vote: append source rows first, or restore vetoed ones")
        probs, weights = vote(neighbors, self.bank.classes, settings.rule, settings.temperature)
        joined = neighbors.ids.new_full((len(probs),), -1)
        return Prediction(probs.float(), weights.float(), neighbors, joined)


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


def replay(changes: Iterable[Change], empty: AdaNPC) -> AdaNPC:
    """The classifier after all changes, applied in order to an empty one with the same settings."""
    for change in changes:
        empty.apply(change)
    return empty


def settings_of(preset: str, options: Mapping[str, Any]) -> Settings | SafeSettings:
    """The settings of a preset with these options, or an error that names the option at fault."""
    require.one_of("preset", preset, PRESETS)
    for name in options:
        if name not in PRESETS[preset]:
            others = [other for other, known in PRESETS.items() if name in known]
            remedy = f": it belongs to preset={others[0]!r}" if others else did_you_mean(name, PRESETS[preset])
            raise AdaNPCError(f"the preset {preset!r} has no option {name!r}{remedy}")
    if preset == "safe":
        return SafeSettings(**options)
    values = dict(options)
    centering = Centering(values.pop("centering", "none"), values.pop("prior", Centering.prior))
    return Settings(**values, centering=centering)


def settings_from(document: Mapping[str, Any]) -> Settings | SafeSettings:
    """The settings that a state's document holds."""
    if "safe" in document:
        return SafeSettings(**document["safe"])
    admission = {name: float(value) for name, value in document["admission"].items()}
    return Settings(
        **document["classifier"], admission=Admission(**admission), centering=Centering(**document["centering"])
    )


def _plain(value: float) -> float | str:
    """The value for JSON, which has no infinities."""
    if value in (float("inf"), float("-inf")):
        return str(value)
    return value
