"""How much of an experiment is done: the paper's own size, or a reduced one that says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adanpc.errors import AdaNPCError
from adanpc.lab.train.spec import DEFAULTS, Spec

EVERY = 300  # steps between evaluations, as in DomainBed
SIZES = ("steps", "batch", "trials", "seeds", "images")


@dataclass(frozen=True)
class Scale:
    """What decides the cost of a table.

    Args:
        name: of the size.
        steps: of training.
        batch: rows of each source domain in a step; 0 is what is usual for the data.
        trials: of the random search; one means defaults.
        seeds: of splits, weights and orders, each a repetition.
        images: of each domain at most.
        encoder: instead of the paper's.
        only: the rows that are wanted; none means all.
    """

    name: str
    steps: int
    batch: int
    trials: int
    seeds: int
    images: int | None
    encoder: str = ""
    only: tuple[str, ...] = ()

    def spec(self, data: str, targets: tuple[str, ...], algorithm: str, seed: int = 0, trial: int = 0) -> Spec:
        """The training of one trial at this scale; photos with BatchNorm's statistics kept, as in DomainBed."""
        photos = data not in DEFAULTS
        return Spec(
            data,
            targets,
            algorithm,
            self.encoder if photos else "",
            steps=self.steps,
            batch=self.batch,
            every=min(EVERY, self.steps),
            seed=seed,
            trial=trial,
            pretrained=True if self.encoder and photos else None,
            frozen_batchnorm=photos,
            images=self.images,
        )

    @property
    def selected(self) -> Literal["best", "last"]:
        """The model of a run that held-out source images select; if it is looked at only once, that is the last."""
        return "best" if self.steps > EVERY else "last"

    def wants(self, row: str) -> bool:
        """Whether a row is made; names are compared without case."""
        return not self.only or row.lower() in {name.lower() for name in self.only}

    def about(self, uses: Sequence[str] = SIZES) -> str:
        """The scale in one sentence that says what is reduced.

        Args:
            uses: the sizes that matter for what is described.
        """
        words = {
            "steps": f"{self.steps:,} steps",
            "batch": f"{self.batch} images of each source domain in a step" if self.batch else "the usual batch",
            "trials": f"{self.trials} {'trial' if self.trials == 1 else 'trials'} of settings",
            "seeds": f"{self.seeds} {'seed' if self.seeds == 1 else 'seeds'}",
            "images": "all images" if self.images is None else f"at most {self.images:,} images of each domain",
        }
        full = SCALES["full"]
        less = [name for name in uses if getattr(self, name) != getattr(full, name)]
        paper = {name: f" (paper {getattr(full, name):,})" for name in less if getattr(full, name)}
        parts = [words[name] + paper.get(name, "") for name in uses]
        parts += [f"encoder {self.encoder} for photos"] if self.encoder else []
        if not parts:
            return f"Scale: {self.name}."
        size = "Reduced" if less else "Full but for the encoder" if self.encoder else "Full"
        return f"{size} ({self.name}): {', '.join(parts)}."


SCALES = {  # from the paper's size downwards; a budget takes the first that fits
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
    """A length of time such as 30m, 2h, 90s or 1h30m, in seconds."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip().lower())
    if not text.strip() or match is None:
        raise AdaNPCError(f"--budget takes a time such as 30m, 2h or 1h30m, got {text!r}")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not total:
        raise AdaNPCError(f"--budget must be longer than nothing, got {text!r}")
    return float(total)


def length(span: float) -> str:
    """Seconds in words, such as 3 min or 2.5 h."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if span >= 2 * size or (unit == "min" and span >= 60):
            return f"{span / size:.1f} {unit}" if span < 10 * size and unit != "min" else f"{span / size:.0f} {unit}"
    return f"{span:.0f} s"
