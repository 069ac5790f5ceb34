"""The rules by which a classifier learns, each an object that answers what the classifier asks.

``Paper`` and ``Safe`` have the same methods. Each gets the contents of the bank at that moment and keeps nothing but
its settings, so any number of threads may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from adanpc import require
from adanpc.core import safe, turns
from adanpc.core.changes import Append
from adanpc.core.contents import Contents
from adanpc.core.eviction import Eviction
from adanpc.core.guard import Signs
from adanpc.core.paper import Paper
from adanpc.core.safe import Question, SafeSettings
from adanpc.core.types import Prediction, with_fields
from adanpc.errors import ArgumentError
from adanpc.require import did_you_mean


class Safe:
    """Answers and changes as ``adanpc.core.safe`` describes."""

    name = "safe"
    options = ("stream", "transform", "screen", "guard", "balance", "carry", "home")
    keeps_probabilities = True
    needs_all_at_once = True  # the transform is made of all source rows

    def __init__(self, settings: SafeSettings) -> None:
        self.settings = settings

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Safe:
        """The preset with these of its options."""
        return cls(SafeSettings(**options))

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Safe:
        """The preset that ``document`` described."""
        return cls(SafeSettings(**document["safe"]))

    def document(self) -> dict[str, Any]:
        """The settings in plain values, as a state's document has them."""
        return {"safe": asdict(self.settings)}

    def frozen_queries(self, contents: Contents, features: Tensor) -> Tensor:
        """Checked queries (B, D) as the bank is searched for them before anything is learned from a stream."""
        return safe.still(contents, features)

    def predict(self, contents: Contents, features: Tensor, exclude: Tensor | None) -> Prediction:
        """The answer that each of these checked queries (B, D) would get if it came next."""
        return safe.predict(contents, features, self.settings, exclude)

    def propose(
        self,
        contents: Contents,
        queue_of: Callable[[Contents], Eviction | None],
        features: Tensor,
        domain: int,
        keys: Tensor | None,
    ) -> tuple[Prediction, Append | None, Tensor | None]:
        """The answers to checked queries in turn, the change by which they join, and its rows at length one."""
        prediction, change, rows = turns.propose(contents, queue_of(contents), features, self.settings)
        if change is not None:
            if keys is not None:
                keys = keys[prediction.joined >= 0]
            change = with_fields(change, domain=domain, keys=keys)
        return prediction, change, rows

    def questions(self, contents: Contents, features: Tensor, most: int) -> list[Question]:
        """Those of these checked queries (B, D), at most so many, whose labels would say most."""
        return safe.questions(contents, features, self.settings, most)

    def signs(self, contents: Contents) -> Signs:
        """What the guard sees in the stream."""
        return contents.stream().signs(contents.calibration())

    def prepared(self, contents: Contents, change: Append, features: Tensor) -> Append:
        """The change with its checked features (n, D) as the bank is to store them."""
        return safe.prepared(change, features, contents, self.settings)


Preset = Paper | Safe
PRESETS: dict[str, type[Paper] | type[Safe]] = {"paper": Paper, "safe": Safe}


def preset_of(name: str, options: Mapping[str, Any]) -> Preset:
    """The preset of this name with these options, or an error that names the option at fault."""
    require.one_of("preset", name, PRESETS)
    preset = PRESETS[name]
    for option in options:
        if option not in preset.options:
            others = [other for other, known in PRESETS.items() if option in known.options]
            remedy = did_you_mean(option, ("bank", "preset", *preset.options))
            if others:
                remedy = f": it belongs to preset={others[0]!r}"
            raise ArgumentError(f"the preset {name!r} has no option {option!r}{remedy}")
    return preset.of_options(options)


def preset_from(document: Mapping[str, Any]) -> Preset:
    """The preset that a state's document describes."""
    if "safe" in document:
        return Safe.of_document(document)
    return Paper.of_document(document)
