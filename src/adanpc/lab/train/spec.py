"""What is trained, on what, and how: all that decides a run, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple

from adanpc.errors import AdaNPCError
from adanpc.lab.train.registry import ALGORITHMS
from adanpc.lab.train.search import Choice, Draw, Power, draw


class Habit(NamedTuple):
    """What is usual for images of a kind, after DomainBed: defaults, and what a random search draws from."""

    encoder: str
    pretrained: bool
    batch: int
    hyper: Mapping[str, Any]
    space: Mapping[str, Draw]


DIGITS = Habit("convnet", False, 64, {"lr": 1e-3}, {"lr": Power(-4.5, -2.5), "batch": Power(3, 9, 2, whole=True)})
TINY = Habit("wrn-40-2", False, 128, {"lr": 1e-3}, {"lr": Power(-4.5, -2.5), "batch": Power(3, 9, 2, whole=True)})
PHOTOS = Habit(
    "resnet-50",
    True,
    32,
    {"lr": 5e-5},
    {
        "lr": Power(-5, -3.5),
        "weight_decay": Power(-6, -2),
        "batch": Power(3, 5.5, 2, whole=True),
        "dropout": Choice((0.0, 0.1, 0.5)),
    },
)
STEPS = 5000  # of a training as DomainBed has it, which numbers of steps among the settings are meant for
HABITS = {"rotated-mnist": DIGITS, "cifar-10": TINY, "cifar-10-c": TINY}  # others are photos


@dataclass(frozen=True)
class Spec:
    """A run of training; the same spec on the same data and machine gives the same weights.

    Args:
        data: a data set by name, see ``adanpc.lab.data.read``.
        targets: the domains that are not trained on.
        algorithm: by name, see ``adanpc.lab.train.ALGORITHMS``.
        encoder: by name, see ``adanpc.models.build``; by default the usual one for the data.
        steps: updates. Settings that are numbers of steps, such as when a penalty begins, are by default as large a
            part of these as of DomainBed's 5,000.
        batch: rows from each source domain in each step.
        every: after how many steps the model is evaluated and the run saved.
        seed: decides the splits, the initial weights, the order of samples and every other random choice.
        hyper: the algorithm's own settings, lr and weight_decay among them.
        trial: 0 keeps the defaults; any other number draws what ``hyper`` leaves open from the search space, for every
            seed anew and for all algorithms alike.
        pretrained: starts from published weights; by default where that is usual for the data.
        weights: a file to start from.
        norm, dropout, frozen_batchnorm: of the ``SourceModel``.
        augment: random crops, flips and colors in training; by default for photos.
        images: of each domain at most, drawn by the seed, for a quick look; by default all.
    """

    data: str
    targets: tuple[str, ...]
    algorithm: str = "erm"
    encoder: str = ""
    steps: int = STEPS
    batch: int = 0
    every: int = 300
    seed: int = 0
    hyper: Mapping[str, Any] = field(default_factory=dict)
    trial: int = 0
    pretrained: bool | None = None
    weights: str | None = None
    norm: bool = False
    dropout: float = 0.0
    frozen_batchnorm: bool = False
    augment: bool | None = None
    images: int | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise AdaNPCError(f"there is no algorithm {self.algorithm!r}; there are: {', '.join(ALGORITHMS)}")
        for name, least in (("steps", 1), ("batch", 0), ("every", 1), ("seed", 0), ("trial", 0)):
            if getattr(self, name) < least:
                raise AdaNPCError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.images is not None and self.images < 2:
            raise AdaNPCError(f"images must be at least 2, one to learn from and one to select by, got {self.images}")

    def complete(self) -> Spec:
        """The spec with every default and every drawn value filled in; completing it again changes nothing."""
        habit = HABITS.get(self.data, PHOTOS)
        kind = ALGORITHMS[self.algorithm]
        drawn = draw({**habit.space, **kind.space}, self.trial, self.seed)
        batch, dropout = drawn.pop("batch", habit.batch), drawn.pop("dropout", 0.0)
        usual = {name: signature(kind).parameters[name].default for name in kind.paced}
        paced = {name: round({**usual, **drawn}[name] * self.steps / STEPS) for name in usual}
        return replace(
            self,
            encoder=self.encoder or habit.encoder,
            batch=self.batch or kind.batch or batch,
            hyper={**habit.hyper, **drawn, **paced, **self.hyper},
            trial=0,
            dropout=self.dropout or dropout,
            pretrained=habit.pretrained and not self.encoder if self.pretrained is None else self.pretrained,
            augment=habit is PHOTOS if self.augment is None else self.augment,
        )

    def document(self) -> dict[str, Any]:
        """The spec as JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Spec:
        """The spec that ``document`` wrote."""
        return cls(**{**document, "targets": tuple(document["targets"])})
