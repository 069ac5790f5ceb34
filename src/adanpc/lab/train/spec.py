"""Everything that decides a run of training, as one value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from inspect import Parameter, signature
from typing import Any, NamedTuple

from adanpc.errors import AdaNPCError
from adanpc.lab.data.read import check_named_data, find_data
from adanpc.lab.networks.encoders import check_named_encoder, find_encoder, is_own_encoder
from adanpc.lab.own import is_own
from adanpc.lab.settings import check_settings
from adanpc.lab.train.algorithm import Algorithm
from adanpc.lab.train.registry import find, known
from adanpc.lab.train.search import Choice, Draw, Power, draw
from adanpc.require import between, did_you_mean, text, whole

DOMAINBED_STEPS = 5000  # the length of a DomainBed run, which defaults that count steps assume
MOST_STEPS = 10**12  # far beyond any training, but within what torch can count
MOST_ROWS = 10**6  # in a batch
GIVEN = ("self", "model", "domains", "adam")  # parameters of an algorithm's constructor that are not settings


class Defaults(NamedTuple):
    """The settings that DomainBed uses for one kind of images.

    Args:
        encoder: the name of the encoder.
        pretrained: whether the encoder starts from published weights.
        photos: whether the images are photos, which are augmented, and for which some algorithms have other defaults.
        batch: the number of rows from each source domain in each step.
        every: the number of steps between two evaluations of the model.
        hyper: settings of the algorithm.
        space: the distributions from which a random search draws these settings, ``batch`` and ``dropout``.
    """

    encoder: str
    pretrained: bool
    photos: bool
    batch: int
    every: int
    hyper: Mapping[str, Any]
    space: Mapping[str, Draw]


SMALL_IMAGES = Defaults(
    encoder="convnet",
    pretrained=False,
    photos=False,
    batch=64,
    every=100,
    hyper={"lr": 1e-3},
    space={"lr": Power(-4.5, -2.5), "batch": Power(3, 9, 2, whole=True)},
)
PHOTOS = Defaults(
    encoder="resnet-50",
    pretrained=True,
    photos=True,
    batch=32,
    every=300,
    hyper={"lr": 5e-5},
    space={
        "lr": Power(-5, -3.5),
        "weight_decay": Power(-6, -2),
        "batch": Power(3, 5.5, 2, whole=True),
        "dropout": Choice((0.0, 0.1, 0.5)),
    },
)
CIFAR = SMALL_IMAGES._replace(encoder="wrn-40-2", batch=128, every=300)
DOMAIN_NET = PHOTOS._replace(every=1000, space={**PHOTOS.space, "batch": Power(3, 5, 2, whole=True)})
DEFAULTS = {"rotated-mnist": SMALL_IMAGES, "cifar-10": CIFAR, "cifar-10-c": CIFAR, "domain-net": DOMAIN_NET}


def usual(data: str) -> Defaults:
    """Returns the defaults for a data set by name; data sets that are not listed are taken to hold photos."""
    return DEFAULTS.get(data, PHOTOS)


@dataclass(frozen=True)
class Spec:
    """A run of training; the same spec on the same data and machine gives the same weights.

    Args:
        data: the name of a data set; see ``adanpc.lab.data.read``.
        targets: the domains that are not trained on.
        algorithm: the name of an algorithm; see ``adanpc.lab.train.find``.
        encoder: the name of an encoder; see ``adanpc.lab.networks.build``. By default the usual one for the data.
        steps: the number of updates. The defaults of settings that count steps, such as the step at which a penalty
            begins, assume DomainBed's 5,000 and are scaled to this number.
        batch: the number of rows from each source domain in each step; with 0, the usual number.
        every: the number of steps after which the model is evaluated and the run saved; with 0, the usual number.
        seed: decides the splits, the initial weights, the order of samples and every other random choice.
        hyper: the algorithm's own settings, including lr and weight_decay.
        trial: 0 keeps the defaults; with any other number, settings that ``hyper`` leaves open are drawn from the
            search space. The draw depends on trial and seed, not on the algorithm.
        pretrained: whether to start from published weights; by default if that is usual for the data.
        weights: a file of weights to start from.
        norm, dropout, frozen_batchnorm: see ``SourceModel``.
        straight_resize: whether images of any shape are resized to a square, as in DomainBed; by default the shorter
            side is resized and the center cropped, if that is how the encoder was trained.
        augment: whether to crop, flip and recolor images at random in training; by default for photos.
        images: the largest number of images of each domain to use, drawn by the seed, for a quick look; by default all.
    """

    data: str
    targets: tuple[str, ...]
    algorithm: str = "erm"
    encoder: str = ""
    steps: int = DOMAINBED_STEPS
    batch: int = 0
    every: int = 0
    seed: int = 0
    hyper: Mapping[str, Any] = field(default_factory=dict)
    trial: int = 0
    pretrained: bool | None = None
    weights: str | None = None
    norm: bool = False
    dropout: float = 0.0
    frozen_batchnorm: bool = False
    straight_resize: bool = False
    augment: bool | None = None
    images: int | None = None

    def __post_init__(self) -> None:
        text("data", self.data)
        text("encoder", self.encoder)
        _check_targets(self.targets)
        whole("steps", self.steps, least=1, most=MOST_STEPS)
        whole("batch", self.batch, least=0, most=MOST_ROWS)
        whole("every", self.every, least=0)
        whole("seed", self.seed, least=0)
        whole("trial", self.trial, least=0)
        between("dropout", self.dropout, 0, 1)
        _check_flag("norm", self.norm)
        _check_flag("frozen_batchnorm", self.frozen_batchnorm)
        _check_flag("straight_resize", self.straight_resize)
        if self.pretrained is not None:
            _check_flag("pretrained", self.pretrained)
        if self.augment is not None:
            _check_flag("augment", self.augment)
        if self.weights is not None:
            text("weights", self.weights)
        if self.images is not None:
            whole("images (one to learn from and one to select by)", self.images, least=2)
        # Last, since looking these up may import code of your own, which should not happen for a spec that is wrong.
        algorithm = find(self.algorithm)
        self._load_own_code()
        if not isinstance(self.hyper, Mapping):
            raise AdaNPCError(f"hyper must map names of settings to values, got {self.hyper!r}")
        check_settings(self.algorithm, [algorithm, Algorithm], self.hyper, GIVEN)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A spec may be sent to another process as a pickle, which bypasses the constructor: load own code there, too.
        find(self.algorithm)
        self._load_own_code()

    def _load_own_code(self) -> None:
        """Loads data and encoder if they are your own; other names are checked when they are used."""
        if is_own(self.data):
            find_data(self.data)
        if is_own_encoder(self.encoder):
            find_encoder(self.encoder)

    def complete(self) -> Spec:
        """Returns the spec with every default and every drawn value filled in; completing it again changes nothing."""
        defaults = usual(self.data)
        algorithm = known(self.algorithm)
        space = {**defaults.space, **algorithm.space}
        # From the weakest to the strongest: the algorithm's defaults, those for the data, the algorithm's for photos,
        # what the trial draws and, at the end, what the user has set.
        chosen = {**_default_settings(algorithm), **defaults.hyper, "batch": defaults.batch, "dropout": 0.0}
        if defaults.photos:
            space.update(algorithm.photo_space)
            chosen.update(algorithm.photo_settings)
        chosen.update(draw(space, self.trial, self.seed))
        batch = chosen.pop("batch")
        dropout = chosen.pop("dropout")
        for name in algorithm.paced:
            chosen[name] = round(chosen[name] * self.steps / DOMAINBED_STEPS)
        pretrained = self.pretrained
        if pretrained is None:
            # Only the usual encoder has published weights by default: another one may have none.
            pretrained = defaults.pretrained and not self.encoder
        augment = self.augment
        if augment is None:
            augment = defaults.photos
        return replace(
            self,
            encoder=self.encoder or defaults.encoder,
            batch=self.batch or batch,
            every=self.every or defaults.every,
            hyper={**chosen, **self.hyper},
            trial=0,
            dropout=self.dropout or dropout,
            pretrained=pretrained,
            augment=augment,
        )

    def document(self) -> dict[str, Any]:
        """Returns the spec as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Spec:
        """Returns the spec of a document; refuses a document with a missing or unknown field.

        No code is executed: an algorithm, encoder or data set of your own is refused unless this process has already
        loaded it.
        """
        check_fields("the spec", document, [spec_field.name for spec_field in fields(cls)])
        # These checks come before the constructor, which would import what the document names.
        known(document["algorithm"])
        check_named_encoder(text("encoder", document["encoder"]))
        check_named_data(text("data", document["data"]))
        values = dict(document)
        if isinstance(values["targets"], list):  # JSON has no tuples
            values["targets"] = tuple(values["targets"])
        return cls(**values)


@cache  # the plan of a large table completes a hundred thousand specs of a few algorithms
def _default_settings(algorithm: type[Algorithm]) -> Mapping[str, Any]:
    """Returns the defaults of an algorithm's settings, except those that JSON cannot hold."""
    parameters = signature(algorithm).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    if takes_any:  # most algorithms pass keyword arguments, such as lr, on to ``Algorithm``
        for name, parameter in signature(Algorithm).parameters.items():
            defaults.setdefault(name, parameter.default)
    settings = {}
    for name, value in defaults.items():
        if name not in GIVEN and isinstance(value, bool | int | float | str | None):
            settings[name] = value
    return settings


def check_fields(what: str, document: Any, names: Collection[str]) -> None:
    """Refuses a document that is not an object with exactly these fields."""
    if not isinstance(document, Mapping):
        raise AdaNPCError(f"{what} must be an object with named fields, got {document!r}")
    for name in names:
        if name not in document:
            raise AdaNPCError(f"{what} has no field {name!r}")
    for name in document:
        if name not in names:
            raise AdaNPCError(f"{what} has an unknown field {name!r}{did_you_mean(name, names)}")


def _check_targets(targets: Any) -> None:
    """Refuses anything but a tuple of names."""
    if not isinstance(targets, tuple):
        raise AdaNPCError(f"targets must be a tuple of domain names, got {targets!r}")
    for name in targets:
        text("each of the targets", name)


def _check_flag(name: str, value: Any) -> None:
    """Refuses anything but True and False."""
    if not isinstance(value, bool):
        raise AdaNPCError(f"{name} must be True or False, got {value!r}")
