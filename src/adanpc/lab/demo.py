"""Successive adaptation on rotated digits: what the bank learns along the way, and whether it forgets the source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc import require
from adanpc.core import AdaNPC, Admission, MemoryBank
from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain, split
from adanpc.lab.networks.convnet import ConvNet
from adanpc.progress import track

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # type: ignore[assignment, misc]

HEAD = "linear head"
FROZEN = "frozen k-NN"
PAPER = "paper's rule"
ADAPTED = "AdaNPC"  # the library's default, the preset "safe"
METHODS = (HEAD, FROZEN, PAPER, ADAPTED)
CLASSES = 10
IMAGES_AT_ONCE = 128  # through the encoder; changes the speed and nothing else
SUFFIXES = (".png", ".pdf", ".svg")


class Curve(NamedTuple):
    """One line of the figure's right half: an accuracy of a method on the source."""

    method: str
    measure: str  # a field of OnSource
    label: str
    style: str
    color: str


# Colors of Okabe and Ito, which color-blind readers can tell apart.
DOMAIN_STYLES = {HEAD: "s--", FROZEN: "^-", PAPER: "D-", ADAPTED: "o-"}
DOMAIN_COLORS = {HEAD: "#555555", FROZEN: "#E69F00", PAPER: "#CC79A7", ADAPTED: "#0072B2"}
SOURCE_CURVES = (
    Curve(ADAPTED, "training", "AdaNPC, training digits", "o-", "#0072B2"),
    Curve(ADAPTED, "without_own_row", "AdaNPC, training digits without own row", "D-", "#56B4E9"),
    Curve(ADAPTED, "held_out", "AdaNPC, held-out digits", "v-", "#009E73"),
    Curve(PAPER, "held_out", "paper's rule, held-out digits", "v--", "#CC79A7"),
    Curve(HEAD, "held_out", "linear head, held-out digits", ":", "#555555"),
)
LEGEND: dict[str, Any] = {"fontsize": 9, "framealpha": 1, "edgecolor": "none"}


@dataclass(frozen=True)
class Settings:
    """How the network is trained and how the bank votes.

    ``k``, ``temperature`` and ``min_confidence`` apply to the frozen vote and to the paper's rule. They are the
    defaults of ``AdaNPC`` and were not tuned; ``k`` is also the paper's value for Rotated MNIST. ``epochs`` and
    ``batch`` were chosen from three pairs by accuracy on held-out source digits and by time.
    """

    seed: int = 0
    epochs: int = 20
    batch: int = 16
    rate: float = 1e-3
    k: int = 10
    temperature: float = 0.1
    min_confidence: float = 0.9

    def __post_init__(self) -> None:
        require.whole("epochs", self.epochs, least=1)
        require.whole("batch", self.batch, least=1)


@dataclass(frozen=True)
class OnSource:
    """Accuracies of one method on the source domain, in percent."""

    training: float  # on the training digits, each of which finds its own row in the bank
    without_own_row: float  # on the same digits, when a digit's own row may not vote
    held_out: float  # on digits that were not trained on and that are in no bank


@dataclass(frozen=True)
class Stage:
    """What was measured at one domain, by method, in percent."""

    domain: str
    accuracy: dict[str, float]  # each digit is answered before it may join; for the source, on held-out digits
    on_source: dict[str, OnSource]  # after this domain
    rows: dict[str, int]  # rows in the bank of each method that learns, after this domain


@dataclass(frozen=True)
class Result:
    """The stages in order; the first is the source, before any adaptation."""

    settings: Settings
    stages: tuple[Stage, ...]

    def average(self, method: str) -> float:
        """The mean accuracy over the target domains."""
        targets = [stage.accuracy[method] for stage in self.stages[1:]]
        return sum(targets) / len(targets)


class ComparedMethods:
    """The four methods that are compared, on the same features and with the same labeled source rows (n, D)."""

    def __init__(self, head: nn.Module, features: Tensor, labels: Tensor, settings: Settings) -> None:
        self.head = head
        self.frozen = _voting(features, labels, settings)
        self.paper = _voting(features, labels, settings)
        self.adapted = AdaNPC(MemoryBank(features.shape[1], CLASSES, soft=True), preset="safe")
        self.adapted.learn(features, labels)

    def predict(self, features: Tensor, own_rows: Tensor | None = None) -> dict[str, Tensor]:
        """Each method's labels (B,). Nothing is learned, and the rows with the ids ``own_rows`` (B, 1) may not vote."""
        return {
            HEAD: self.head(features).argmax(1),
            FROZEN: self.frozen.predict(features, exclude=own_rows).labels,
            PAPER: self.paper.predict(features, exclude=own_rows).labels,
            ADAPTED: self.adapted.predict(features, exclude=own_rows).labels,
        }

    def adapt(self, features: Tensor) -> dict[str, Tensor]:
        """Each method's labels (B,); the last two methods learn from their own answers, one query after another."""
        return {
            HEAD: self.head(features).argmax(1),
            FROZEN: self.frozen.predict(features).labels,
            PAPER: self.paper.step(features).labels,
            ADAPTED: self.adapted.step(features).labels,
        }

    def rows(self) -> dict[str, int]:
        """The number of rows in the bank of each method that learns."""
        return {PAPER: len(self.paper.bank), ADAPTED: len(self.adapted.bank)}


def _voting(features: Tensor, labels: Tensor, settings: Settings) -> AdaNPC:
    """A classifier with the paper's rule whose bank holds the source rows."""
    classifier = AdaNPC(
        MemoryBank(features.shape[1], CLASSES),
        k=settings.k,
        temperature=settings.temperature,
        admission=Admission(min_confidence=settings.min_confidence),
    )
    classifier.learn(features, labels)
    return classifier


def successive(domains: Sequence[Domain], settings: Settings | None = None) -> Result:
    """Trains on the first domain alone, then adapts to the others in order with one bank that is never reset.

    The labels of targets are used only to count right answers. The same domains and settings give the same result,
    whatever the number of cores; another processor or another version of torch may round differently.
    """
    settings = settings or Settings()
    if len(domains) < 2:
        raise AdaNPCError(f"at least 2 domains are needed, a source and a target, got {len(domains)}")
    source = domains[0]
    targets = domains[1:]
    training, held_out = split(source, settings.seed)
    encoder, head = fit(training, settings)
    training_features = encode(encoder, training)
    held_out_features = encode(encoder, held_out)
    compared = ComparedMethods(head, training_features, training.labels, settings)
    own_rows = torch.arange(len(training))[:, None]  # the bank numbers rows in order of arrival

    def on_source() -> dict[str, OnSource]:
        seen = accuracies(compared.predict(training_features), training.labels)
        without_own_row = accuracies(compared.predict(training_features, own_rows), training.labels)
        unseen = accuracies(compared.predict(held_out_features), held_out.labels)
        return {method: OnSource(seen[method], without_own_row[method], unseen[method]) for method in METHODS}

    before = accuracies(compared.predict(held_out_features), held_out.labels)
    stages = [Stage(source.name, before, on_source(), compared.rows())]
    bar = track(targets, "adapting")
    for domain in bar:
        accuracy = accuracies(compared.adapt(encode(encoder, domain)), domain.labels)
        bar.note(f"{domain.name}°: AdaNPC {accuracy[ADAPTED]:.1f} %, linear head {accuracy[HEAD]:.1f} %")
        stages.append(Stage(domain.name, accuracy, on_source(), compared.rows()))
    return Result(settings, tuple(stages))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: sums then have one order, and the number of cores cannot change the network."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def fit(training: Domain, settings: Settings) -> tuple[ConvNet, nn.Linear]:
    """An encoder and a linear head, trained together with cross-entropy and then frozen.

    The global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        encoder = ConvNet()
        head = nn.Linear(ConvNet.features, CLASSES)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=settings.rate)
    steps = settings.epochs * ceil(len(training) / settings.batch)
    batches = _batches(len(training), settings)
    bar = track(batches, f"training on {training.name}°", steps)
    for batch in bar:
        scores = head(encoder(training.take(batch)))
        loss = cross_entropy(scores, training.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.note(f"loss {loss.item():.3f}")
    return encoder.requires_grad_(False), head.requires_grad_(False)


def _batches(count: int, settings: Settings) -> Iterator[Tensor]:
    """The positions of the digits in each step; every epoch has a new order."""
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        order = torch.randperm(count, generator=generator)
        yield from order.split(settings.batch)


@one_thread()
def encode(encoder: ConvNet, domain: Domain) -> Tensor:
    """The features (n, D) of the images of a domain."""
    parts = torch.arange(len(domain)).split(IMAGES_AT_ONCE)
    return torch.cat([encoder(domain.take(rows)) for rows in parts])


def accuracies(answers: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """The share of right answers of each method, in percent."""
    shares = {}
    for method, answer in answers.items():
        right = answer == labels
        shares[method] = 100 * right.double().mean().item()
    return shares


def check_plot(path: Path) -> None:
    """Refuses a path that ``draw`` could not write, so that no work is done in vain."""
    if Figure is None:
        raise AdaNPCError("the figure is drawn by matplotlib, which is not installed: pip install 'adanpc[demo]'")
    if path.suffix not in SUFFIXES:
        raise AdaNPCError(f"the path of the figure must end in one of {', '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise AdaNPCError(f"the folder {str(path.parent)!r} does not exist: create it, or choose another place")
    written = path if path.exists() else path.parent
    if path.is_dir() or not os.access(written, os.W_OK):
        raise AdaNPCError(f"{str(path)!r} cannot be written: choose another place")


def draw(result: Result, path: Path) -> None:
    """Writes a figure: on the left the accuracy on each domain, on the right the accuracy on the source after each."""
    check_plot(path)
    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_domains(left, result)
    _draw_source(right, result)
    figure.savefig(path)


def _draw_domains(axes: Axes, result: Result) -> None:
    names = _domain_names(result)
    for method in METHODS:
        values = [stage.accuracy[method] for stage in result.stages]
        axes.plot(names, values, DOMAIN_STYLES[method], color=DOMAIN_COLORS[method], label=method)
    _decorate(axes, "Each domain as it is met", "domain", 0)
    axes.legend(loc="upper right", **LEGEND)


def _draw_source(axes: Axes, result: Result) -> None:
    names = _domain_names(result)
    for curve in SOURCE_CURVES:
        values = [getattr(stage.on_source[curve.method], curve.measure) for stage in result.stages]
        axes.plot(names, values, curve.style, color=curve.color, label=curve.label, markersize=5)
    lowest = min(stage.on_source[method].held_out for stage in result.stages for method in METHODS)
    bottom = max(0, int(lowest // 10 * 10) - 10)  # leaves room for the legend
    _decorate(axes, f"The source, {names[0]}, afterwards (axis from {bottom} %)", "domain just met", bottom)
    axes.legend(loc="lower left", **LEGEND)


def _domain_names(result: Result) -> list[str]:
    return [f"{stage.domain}°" for stage in result.stages]


def _decorate(axes: Axes, title: str, x_label: str, bottom: int) -> None:
    """Adds title, labels and grid; the y-axis begins at ``bottom`` and ends just above 100 %."""
    top = 100 + (100 - bottom) / 25
    axes.set(xlabel=x_label, ylabel="accuracy (%)", ylim=(bottom, top))
    axes.set_title(title, loc="left", fontsize=11)
    axes.locator_params(axis="y", integer=True)
    axes.grid(color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
