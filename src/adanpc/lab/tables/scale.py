"""Scales: the size of an experiment, from the paper's own down to tiny ones; a reduced one always says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adanpc.errors import AdaNPCError
from adanpc.lab.train.spec import Spec, usual

SIZES = ("steps", "batch", "trials", "seeds", "images")
HOUR = 3600.0  # seconds
DAY = 24 * HOUR


@dataclass(frozen=True)
class Scale:
    """The size of a table, which decides its cost.

    Args:
        name: the name of the scale.
        steps: training steps.
        batch: images of each source domain per step; 0 stands for the usual number for the data.
        trials: trials of the random search over settings; 1 means the default settings.
        seeds: repetitions, each with its own splits, weights and order of arrival.
        images: the most images of each domain; None takes all.
        encoder: an encoder to use for photos instead of the paper's.
        only: the rows to make; empty means all.
        methods: a user's own methods, or those of installed packages, as further rows of tables that compare methods.
        algorithms: the same for training algorithms, in tables that compare these.
    """

    name: str
    steps: int
    batch: int
    trials: int
    seeds: int
    images: int | None
    encoder: str = ""
    only: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()

    def spec(self, data: str, targets: tuple[str, ...], algorithm: str, seed: int = 0, trial: int = 0) -> Spec:
        """The training of one trial at this scale; for photos, BatchNorm statistics are frozen, as in DomainBed."""
        photos = usual(data).photos
        encoder = ""
        pretrained = None
        if photos and self.encoder:
            encoder = self.encoder
            pretrained = True
        return Spec(
            data,
            targets,
            algorithm,
            encoder,
            steps=self.steps,
            batch=self.batch,
            seed=seed,
            trial=trial,
            pretrained=pretrained,
            frozen_batchnorm=photos,
            images=self.images,
        )

    def selected(self, data: str) -> Literal["best", "last"]:
        """The model that held-out source images select; with a single evaluation, at the end, that is the last one."""
        return "best" if self.steps > usual(data).every else "last"

    def wants(self, row: str) -> bool:
        """Whether a row is to be made; upper and lower case do not matter."""
        return not self.only or row.lower() in {name.lower() for name in self.only}

    def about(self, uses: Sequence[str] = SIZES) -> str:
        """The scale in one sentence, which says what is reduced.

        Args:
            uses: the sizes that matter for the table that is described.
        """
        full = SCALES["full"]
        reduced = False
        parts = []
        for size in uses:
            words = self._words(size)
            usual = getattr(full, size)
            if getattr(self, size) != usual:
                reduced = True
                if usual:
                    words += f" (paper {usual:,})"
            parts.append(words)
        if self.encoder:
            parts.append(f"encoder {self.encoder} for photos")
        if not parts:
            return f"Scale: {self.name}."
        kind = "Full"
        if reduced:
            kind = "Reduced"
        elif self.encoder:
            kind = "Full except for the encoder"
        return f"{kind} ({self.name}): {', '.join(parts)}."

    def _words(self, size: str) -> str:
        """One of the sizes, in words."""
        match size:
            case "steps":
                return f"{self.steps:,} steps"
            case "batch":
                return f"{self.batch} images of each source domain per step" if self.batch else "the usual batch"
            case "trials":
                return "1 trial of settings" if self.trials == 1 else f"{self.trials} trials of settings"
            case "seeds":
                return "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
            case _:
                return "all images" if self.images is None else f"at most {self.images:,} images of each domain"


SCALES = {  # from the paper's size down
    scale.name: scale
    for scale in (
        Scale("full", 5000, 0, 20, 3, None),
        Scale("large", 1000, 0, 3, 3, None),
        Scale("medium", 500, 32, 1, 3, 5000),
        Scale("small", 300, 16, 1, 1, 2000),
        Scale("tiny", 100, 8, 1, 1, 500),
        Scale("least", 20, 8, 1, 1, 100),
    )
}


def seconds(text: str) -> float:
    """The seconds in a length of time such as 30m, 2h, 90s or 1h30m."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip().lower())
    if not text.strip() or match is None:
        raise AdaNPCError(f"budget must be a time such as 30m, 2h or 1h30m, got {text!r}")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if total == 0:
        raise AdaNPCError(f"budget must be longer than 0 s, got {text!r}")
    return float(total)


def length(span: float) -> str:
    """A number of seconds in words, such as 3 min or 2.5 h."""
    if span < 60:
        return f"{span:.0f} s"
    if span < 2 * HOUR:
        return f"{span / 60:.0f} min"
    if span < 2 * DAY:
        return f"{_rounded(span / HOUR)} h"
    return f"{_rounded(span / DAY)} days"


def _rounded(number: float) -> str:
    """The number with one decimal if it is below 10, else without decimals."""
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"
