"""The preset "paper": the nearest rows vote, and confident answers join the bank as if they were labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.admission import Admission
from adanpc.core.centering import Centering
from adanpc.core.changes import Append
from adanpc.core.contents import WIDEST, Contents, Pool
from adanpc.core.eviction import Eviction
from adanpc.core.sequence import resolve
from adanpc.core.source import Source
from adanpc.core.types import Neighbors, Origin, Prediction, side_by_side
from adanpc.core.vote import check_vote_settings, vote
from adanpc.errors import AdaNPCError, EmptyBankError
from adanpc.index import unit
from adanpc.index.grid import array_if_on_cpu

DEFAULT_ADMISSION = Admission(min_confidence=0.9)
NO_CENTERING = Centering()


@dataclass(frozen=True)
class PaperSettings:
    """How a classifier with the preset "paper" votes, and which queries it admits; see ``AdaNPC``."""

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
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, require.whole(name, given, least=1, most=WIDEST))
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
        """Which rows vote on a query: the k nearest of all, or so many of the source and so many others."""
        if self.k_source is None or self.k_target is None:
            return [Pool(self.k)]
        return [Pool(self.k_source, source=True), Pool(self.k_target, source=False)]


class Paper:
    """Answers and changes by the paper's rule, with the methods that ``presets`` requires of a preset."""

    name = "paper"
    options = ("k", "k_source", "k_target", "rule", "temperature", "admission", "centering", "prior")
    keeps_probabilities = False

    def __init__(self, settings: PaperSettings) -> None:
        self.settings = settings

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Paper:
        """The preset with the options of ``AdaNPC``; options that are not given have their defaults."""
        values = dict(options)
        mode = values.pop("centering", "none")
        prior = values.pop("prior", Centering.prior)
        settings = PaperSettings(**values, centering=Centering(mode, prior))
        return cls(settings)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Paper:
        """The preset that the document of a state describes."""
        thresholds = {name: float(value) for name, value in document["admission"].items()}
        admission = Admission(**thresholds)
        centering = Centering(**document["centering"])
        settings = PaperSettings(**document["classifier"], admission=admission, centering=centering)
        return cls(settings)

    def document(self) -> dict[str, Any]:
        """The settings in plain values, as the document of a state holds them."""
        settings = self.settings
        return {
            "classifier": {
                "k": settings.k,
                "k_source": settings.k_source,
                "k_target": settings.k_target,
                "rule": settings.rule,
                "temperature": settings.temperature,
            },
            "admission": {name: _plain(value) for name, value in asdict(settings.admission).items()},
            "centering": asdict(settings.centering),
        }

    # Answering

    def frozen_queries(self, contents: Contents, features: Tensor) -> Tensor:
        """The vectors (B, D) to search the bank for, if nothing had been learned from a stream.

        Args:
            contents: the contents of the bank.
            features: (B, D) the queries, checked.
        """
        centered, _ = self.settings.centering.queries(features, contents.statistics, sequence=False)
        return centered

    def predict(self, contents: Contents, features: Tensor, exclude: Tensor | None) -> Prediction:
        """The answer that each query would get if it came next.

        Args:
            contents: the contents of the bank.
            features: (B, D) the queries, checked.
            exclude: (B, E) ids of rows that may not vote on that query.
        """
        queries = unit(self.frozen_queries(contents, features))
        sides = contents.nearest_of(queries, self.settings.pools, exclude)
        voters = side_by_side(sides)
        return self._answer(contents.settings.classes, voters)

    def propose(
        self,
        contents: Contents,
        queue_of: Callable[[Contents], Eviction | None],
        features: Tensor,
        domain: int,
        keys: Tensor | None,
    ) -> tuple[Prediction, Append | None, Tensor | None]:
        """The answers to queries that arrive in order, the change that lets the admitted ones join, and its unit rows.

        Args:
            contents: the contents of the bank.
            queue_of: returns the eviction queue of contents; None without a capacity.
            features: (B, D) the queries, checked.
            domain: the domain that the queries come from; -1 if it is unknown.
            keys: (B,) the user's own numbers for the queries.
        """
        settings = self.settings
        centered, observed = settings.centering.queries(features, contents.statistics, sequence=True)
        queries = unit(centered)
        vote_on = partial(self._answer, contents.settings.classes)
        prediction = resolve(contents, queue_of, queries, settings.pools, vote_on, settings.admission)
        joins = array_if_on_cpu(prediction.joined) >= 0
        if observed is None and not joins.any():
            return prediction, None, None
        chosen = None  # all of them: no mask is needed
        if not joins.all():
            chosen = torch.as_tensor(joins)
        soft = None
        if contents.settings.soft:
            soft = _selected(prediction.probs, chosen)
        if keys is not None:
            keys = _selected(keys, chosen)
        change = Append(
            _selected(centered, chosen),
            _selected(prediction.labels, chosen),
            Origin.ADMITTED,
            soft=soft,
            domain=domain,
            confidence=_selected(prediction.confidence, chosen),
            keys=keys,
            centered=True,
            observed=observed,
        )
        return prediction, change, _selected(queries, chosen)

    def appending(self, contents: Contents, source: Source) -> Iterator[Append]:
        """The changes that append source rows: one for each piece, or a single one if a mean is taken over all."""
        if self.settings.centering.mode == "none":
            yield from source.changes(contents.settings.dim)
        else:
            yield source.one_change(contents.settings.dim)

    def _answer(self, classes: int, neighbors: Neighbors) -> Prediction:
        """The answers by a vote of these neighbors; whether a query joins is decided later."""
        if neighbors.missing_for_some:
            raise EmptyBankError("no row of the bank may vote: append source rows first, or restore vetoed ones")
        probs, weights = vote(neighbors, classes, self.settings.rule, self.settings.temperature)
        joined = neighbors.ids.new_full((len(probs),), -1)
        return Prediction(probs.float(), weights.float(), neighbors, joined)

    def questions(self, contents: Contents, features: Tensor, most: int) -> NoReturn:
        """Raises an error: this preset has one kind of answer, and so no choice that labels could settle."""
        raise AdaNPCError("ask needs preset='safe': with preset='paper' there is nothing to decide between")

    def signs(self, contents: Contents) -> NoReturn:
        """Raises an error: this preset has no guard."""
        raise AdaNPCError("signs needs preset='safe': with preset='paper' there is nothing to decide between")

    # Changing

    def prepared(self, contents: Contents, change: Append, features: Tensor) -> Append:
        """The change with its features as the bank is to store them; ``features`` (n, D) are its own, checked."""
        return self.settings.centering.prepared(change, features, contents.statistics)


def _selected(values: Tensor, chosen: Tensor | None) -> Tensor:
    """A copy of the values (B, …) at which ``chosen`` (B,) is true, or of all values if it is None."""
    if chosen is None:
        return values.clone()
    return values[chosen]


def _plain(value: float) -> float | str:
    """The value, or its name if it is infinite, for JSON has no infinities."""
    if value in (float("inf"), float("-inf")):
        return str(value)
    return value
