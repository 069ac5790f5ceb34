"""Successive adaptation on rotated digits: what the bank learns on the way, and whether it forgets the source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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

HEAD, FROZEN, ADAPTED = METHODS = ("linear head", "frozen k-NN", "AdaNPC")
MET_STYLES = {HEAD: "s--", FROZEN: "^-", ADAPTED: "o-"}
COLORS = {HEAD: "#555555", FROZEN: "#E69F00", ADAPTED: "#0072B2"}  # Okabe and Ito: told apart by the color-blind too
SOURCE_LINES = (  # method, measure, label, style, color
    (ADAPTED, "training", "AdaNPC, training digits", "o-", "#0072B2"),
    (ADAPTED, "without_own_row", "AdaNPC, training digits without own row", "D-", "#56B4E9"),
    (ADAPTED, "held_out", "AdaNPC, held-out digits", "v-", "#009E73"),
    (HEAD, "training", "linear head, training digits", "--", "#555555"),
    (HEAD, "held_out", "linear head, held-out digits", ":", "#555555"),
)
CLASSES = 10
LEGEND: dict[str, Any] = {"fontsize": 9, "framealpha": 1, "edgecolor": "none"}
SUFFIXES = (".png", ".pdf", ".svg")
IMAGES = 128  # encoded at once; a matter of speed only


@dataclass(frozen=True)
class Settings:
    """How the network is trained and how the bank votes.

    k, temperature and min_confidence are the defaults of ``AdaNPC``, kept whatever came of them; k is also the paper's
    for Rotated MNIST. Epochs and batch were chosen among three pairs by accuracy on held-out source digits and by time.
    """

    seed: int = 0
    epochs: int = 20
    batch: int = 16
    rate: float = 1e-3
    k: int = 10
    temperature: float = 0.1
    min_confidence: float = 0.9

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise AdaNPCError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class OnSource:
    """Accuracies of one method on the source domain, in percent."""

    training: float  # the training digits; in a bank each of them meets its own row
    without_own_row: float  # the same, but that row may not vote
    held_out: float  # digits that nothing was trained on and that are in no bank


@dataclass(frozen=True)
class Stage:
    """What was measured at one domain, by method, in percent."""

    domain: str
    met: dict[str, float]  # on this domain, each digit answered before it may join; at the source, the held-out digits
    source: dict[str, OnSource]  # on the source afterwards
    rows: int  # of AdaNPC's bank afterwards


@dataclass(frozen=True)
class Result:
    """The stages in order, the source first: there nothing is adapted yet."""

    settings: Settings
    stages: tuple[Stage, ...]

    def average(self, method: str) -> float:
        """The mean over the target domains, as met."""
        targets = [stage.met[method] for stage in self.stages[1:]]
        return sum(targets) / len(targets)


class Contest:
    """The three methods on the same features, all knowing the same labeled source rows (n, D)."""

    def __init__(self, head: nn.Module, features: Tensor, labels: Tensor, settings: Settings) -> None:
        self.head = head
        self.frozen, self.adapted = (
            AdaNPC(
                MemoryBank(features.shape[1], CLASSES),
                k=settings.k,
                temperature=settings.temperature,
                admission=Admission(min_confidence=settings.min_confidence),
            )
            for _ in range(2)
        )
        self.frozen.learn(features, labels)
        self.adapted.learn(features, labels)

    def recall(self, features: Tensor, own: Tensor | None = None) -> dict[str, Tensor]:
        """Each method's labels (B,); nobody learns, and the rows ``own`` (B, 1) may not vote."""
        banks = {FROZEN: self.frozen, ADAPTED: self.adapted}
        answers = {name: bank.predict(features, exclude=own).labels for name, bank in banks.items()}
        return {HEAD: self.head(features).argmax(1), **answers}

    def meet(self, features: Tensor) -> dict[str, Tensor]:
        """Each method's labels (B,); AdaNPC learns from its own answers, one after another."""
        return {**self.recall(features), ADAPTED: self.adapted.step(features).labels}


def successive(domains: Sequence[Domain], settings: Settings | None = None) -> Result:
    """Trains on the first domain alone, then meets the others in order with one bank that carries on.

    The labels of targets are used for counting only. The same domains and settings give the same result, whatever the
    number of cores; another processor or torch may round otherwise.
    """
    settings = settings or Settings()
    if len(domains) < 2:
        raise AdaNPCError(f"at least 2 domains are needed, a source and a target, got {len(domains)}")
    training, held_out = split(domains[0], settings.seed)
    encoder, head = fit(training, settings)
    features, fresh = encode(encoder, training), encode(encoder, held_out)
    contest = Contest(head, features, training.labels, settings)
    own = torch.arange(len(features))[:, None]  # rows are numbered as they came

    def on_source() -> dict[str, OnSource]:
        seen = accuracies(contest.recall(features), training.labels)
        hidden = accuracies(contest.recall(features, own), training.labels)
        unseen = accuracies(contest.recall(fresh), held_out.labels)
        return {name: OnSource(seen[name], hidden[name], unseen[name]) for name in METHODS}

    stages = [Stage(domains[0].name, accuracies(contest.recall(fresh), held_out.labels), on_source(), len(features))]
    for domain in (bar := track(domains[1:], "adapting")):
        met = accuracies(contest.meet(encode(encoder, domain)), domain.labels)
        bar.note(f"{domain.name}°: AdaNPC {met[ADAPTED]:.1f} %, linear head {met[HEAD]:.1f} %")
        stages.append(Stage(domain.name, met, on_source(), len(contest.adapted.bank)))
    return Result(settings, tuple(stages))


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order on every machine: the number of cores would otherwise change the trained network."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def fit(training: Domain, settings: Settings) -> tuple[ConvNet, nn.Linear]:
    """An encoder and a linear head trained together by cross-entropy, then fixed; global randomness is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        encoder, head = ConvNet(), nn.Linear(ConvNet.features, CLASSES)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=settings.rate)
    steps = settings.epochs * ceil(len(training) / settings.batch)
    for batch in (bar := track(_batches(len(training), settings), f"training on {training.name}°", steps)):
        loss = cross_entropy(head(encoder(training.take(batch))), training.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.note(f"loss {loss.item():.3f}")
    return encoder.requires_grad_(False), head.requires_grad_(False)


def _batches(count: int, settings: Settings) -> Iterator[Tensor]:
    """Positions of the digits of each step, every epoch in a new order."""
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        yield from torch.randperm(count, generator=generator).split(settings.batch)


@one_thread()
def encode(encoder: ConvNet, domain: Domain) -> Tensor:
    """Features (n, D) of the images of a domain."""
    return torch.cat([encoder(domain.take(rows)) for rows in torch.arange(len(domain)).split(IMAGES)])


def accuracies(answers: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """The share of right answers of each method, in percent."""
    return {name: 100 * (answer == labels).double().mean().item() for name, answer in answers.items()}


def check_plot(path: Path) -> None:
    """Refuses a path that ``draw`` could not write, so that the work need not be done in vain."""
    if Figure is None:
        raise AdaNPCError("the figure is drawn by matplotlib, which is not installed: pip install 'adanpc[bench]'")
    if path.suffix not in SUFFIXES:
        raise AdaNPCError(f"the figure must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise AdaNPCError(f"the folder {str(path.parent)!r} does not exist: create it, or choose another place")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise AdaNPCError(f"{str(path)!r} cannot be written: choose another place")


def draw(result: Result, path: Path) -> None:
    """Writes a figure: on the left each domain as met, on the right the source after each domain."""
    check_plot(path)
    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [f"{stage.domain}°" for stage in result.stages]
    for method in METHODS:
        values = [stage.met[method] for stage in result.stages]
        left.plot(names, values, MET_STYLES[method], color=COLORS[method], label=method)
    for method, measure, label, style, color in SOURCE_LINES:
        values = [getattr(stage.source[method], measure) for stage in result.stages]
        right.plot(names, values, style, color=color, label=label, markersize=5)
    _dress(left, "Each domain as it is met", "domain", 0)
    left.legend(loc="upper right", **LEGEND)
    lowest = min(stage.source[method].held_out for stage in result.stages for method in METHODS)
    bottom = max(0, int(lowest // 10 * 10) - 10)  # leaves room for the legend
    _dress(right, f"The source, {names[0]}, afterwards (axis from {bottom} %)", "domain just met", bottom)
    right.legend(loc="lower left", **LEGEND)
    figure.savefig(path)


def _dress(axes: Axes, title: str, below: str, bottom: int) -> None:
    axes.set(xlabel=below, ylabel="accuracy (%)", ylim=(bottom, 100 + (100 - bottom) / 25))
    axes.set_title(title, loc="left", fontsize=11)
    axes.locator_params(axis="y", integer=True)
    axes.grid(color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
