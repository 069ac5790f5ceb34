"""The presets: the rules by which a classifier answers and learns, each of them an object with the same methods.

``Paper`` and ``Safe`` keep nothing but their settings; their methods get the contents of the bank as an argument. So
any number of threads may use the same preset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from adanpc import require
from adanpc.core import large, safe, turns
from adanpc.core.changes import Append
from adanpc.core.contents import Contents
from adanpc.core.eviction import Eviction
from adanpc.core.guard import Signs
from adanpc.core.paper import Paper
from adanpc.core.safe import Question, SafeSettings
from adanpc.core.source import Source
from adanpc.core.types import Prediction, with_fields
from adanpc.errors import ArgumentError
from adanpc.require import did_you_mean


class Safe:
    """Answers and changes as described in ``adanpc.core.safe``."""

    name = "safe"
    options = ("stream", "transform", "screen", "guard", "balance", "carry", "home")
    keeps_probabilities = True

    def __init__(self, settings: SafeSettings) -> None:
        self.settings = settings

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Safe:
        """The preset with the options of ``AdaNPC``; options that are not given have their defaults."""
        return cls(SafeSettings(**options))

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Safe:
        """The preset that the document of a state describes."""
        return cls(SafeSettings(**document["safe"]))

    def document(self) -> dict[str, Any]:
        """The settings in plain values, as the document of a state holds them."""
        return {"safe": asdict(self.settings)}

    def frozen_queries(self, contents: Contents, features: Tensor) -> Tensor:
        """The vectors (B, D) to search the bank for, if nothing had been learned from a stream."""
        return safe.still(contents, features)

    def predict(self, contents: Contents, features: Tensor, exclude: Tensor | None) -> Prediction:
        """The answer that each checked query (B, D) would get if it came next."""
        return safe.predict(contents, features, self.settings, exclude)

    def propose(
        self,
        contents: Contents,
        queue_of: Callable[[Contents], Eviction | None],
        features: Tensor,
        domain: int,
        keys: Tensor | None,
    ) -> tuple[Prediction, Append | None, Tensor | None]:
        """The answers to queries that arrive in order, the change by which they join, and its unit rows."""
        prediction, change, rows = turns.propose(contents, queue_of(contents), features, self.settings)
        if change is not None:
            if keys is not None:
                keys = keys[prediction.joined >= 0]
            change = with_fields(change, domain=domain, keys=keys)
        return prediction, change, rows

    def questions(self, contents: Contents, features: Tensor, most: int) -> list[Question]:
        """The ``most`` checked queries (B, D) whose labels would tell the most, or fewer."""
        return safe.questions(contents, features, self.settings, most)

    def signs(self, contents: Contents) -> Signs:
        """What the guard sees in the stream."""
        return contents.stream().signs(contents.calibration())

    def prepared(self, contents: Contents, change: Append, features: Tensor) -> Append:
        """The change with its features as the bank is to store them; ``features`` (n, D) are its own, checked."""
        return safe.prepared(change, features, contents, self.settings)

    def appending(self, contents: Contents, source: Source) -> Iterator[Append]:
        """The changes that append source rows: a single one, because the transform is fitted to all, if they fit."""
        if len(source.labels) * contents.settings.dim <= large.AT_ONCE:
            yield source.one_change(contents.settings.dim)
        else:
            yield from large.appending(source, contents, self.settings)


Preset = Paper | Safe
PRESETS: dict[str, type[Paper] | type[Safe]] = {"paper": Paper, "safe": Safe}


def preset_of(name: str, options: Mapping[str, Any]) -> Preset:
    """The preset of this name with these options; raises an ArgumentError that names an unknown option."""
    require.one_of("preset", name, PRESETS)
    preset = PRESETS[name]
    for option in options:
        if option not in preset.options:
            remedy = did_you_mean(option, ("bank", "preset", *preset.options))
            owners = [other for other, known in PRESETS.items() if option in known.options]
            if owners:
                remedy = f": it belongs to preset={owners[0]!r}"
            raise ArgumentError(f"the preset {name!r} has no option {option!r}{remedy}")
    return preset.of_options(options)


def preset_from(document: Mapping[str, Any]) -> Preset:
    """The preset that the document of a state describes."""
    if "safe" in document:
        return Safe.of_document(document)
    return Paper.of_document(document)
