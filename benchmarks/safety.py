"""Does adapting help, and does it ever hurt? The frozen vote, the paper's rule and the preset "safe" on real features.

    python -m benchmarks.safety FILE [FILE …] [--orders random sorted …] [--limit N] [--seeds N]

A file holds the features of a data set's domains: safetensors with "NAME.features" (n, D) and "NAME.labels" (n,) for
each. If one of them is called "source", it is learned and every other one is met; otherwise each is left out in turn.
Prints a Markdown table: accuracy in percent, averaged over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from adanpc.core import AdaNPC, MemoryBank

ORDERS = ("random", "sorted", "dirichlet", "label shift", "one class")
SLOTS = 20  # of a Dirichlet stream
CONCENTRATION = 0.1
FROZEN_NEIGHBORS = 25
Domains = Mapping[str, tuple[Tensor, Tensor]]


class Cell(NamedTuple):
    """Accuracies on one stream."""

    frozen: float  # the vote of raw features
    paper: float
    transformed: float  # the preset "safe" without anything learned from the stream
    safe: float
    mixed: float  # with stream="mixed"


def read(path: Path) -> Domains:
    tensors = load_file(path)
    names = [name.removesuffix(".features") for name in tensors if name.endswith(".features")]
    return {name: (tensors[f"{name}.features"], tensors[f"{name}.labels"]) for name in names}


def problems(domains: Domains) -> Iterator[tuple[str, Domains]]:
    """The name of each target, and the source domains that are learned for it."""
    for target in domains:
        if "source" not in domains:
            yield target, {name: part for name, part in domains.items() if name != target}
        elif target != "source":
            yield target, {"source": domains["source"]}


def orders(labels: Tensor, kind: str, seed: int) -> Iterator[Tensor]:
    """The rows of a stream, in its order; several streams for ``one class``."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = [shuffled[labels[shuffled] == label] for label in labels.unique()]
    if kind == "random":
        yield shuffled
    elif kind == "sorted":
        turns = torch.randperm(len(by_class), generator=generator)
        yield torch.cat([by_class[turn] for turn in turns])
    elif kind == "one class":
        yield from by_class
    elif kind == "label shift":
        shares = 10 ** -torch.linspace(0, 1, len(by_class))[torch.randperm(len(by_class), generator=generator)]
        kept = torch.cat([rows[: max(1, int(share * len(rows)))] for rows, share in zip(by_class, shares, strict=True)])
        yield kept[torch.randperm(len(kept), generator=generator)]
    else:
        yield _dirichlet(by_class, seed)


def _dirichlet(by_class: list[Tensor], seed: int) -> Tensor:
    """Each class spread unevenly over slots of time; within a slot, classes are mixed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        slots: list[list[Tensor]] = [[] for _ in range(SLOTS)]
        for rows in by_class:
            shares = torch.distributions.Dirichlet(torch.full((SLOTS,), CONCENTRATION)).sample()
            ends = (shares.cumsum(0) * len(rows)).long()[:-1]
            for slot, part in zip(slots, rows.tensor_split(ends), strict=True):
                slot.append(part)
        parts = [torch.cat(slot) for slot in slots]
        return torch.cat([part[torch.randperm(len(part))] for part in parts])


class Contest:
    """The competitors, each over the same source rows."""

    def __init__(self, source: Domains, classes: int) -> None:
        features = torch.cat([part for part, _ in source.values()])
        labels = torch.cat([part for _, part in source.values()])
        numbers = [torch.full((len(part),), number) for number, (_, part) in enumerate(source.values())]
        self.models = {
            "frozen": AdaNPC(MemoryBank(features.shape[1], classes), k=FROZEN_NEIGHBORS),
            "paper": AdaNPC(MemoryBank(features.shape[1], classes)),
            "safe": AdaNPC(MemoryBank(features.shape[1], classes, soft=True), preset="safe"),
            "mixed": AdaNPC(MemoryBank(features.shape[1], classes, soft=True), preset="safe", stream="mixed"),
        }
        for model in self.models.values():
            model.learn(features, labels, domain=torch.cat(numbers))
        self.start = {name: model.bank.contents for name, model in self.models.items()}

    def meet(self, features: Tensor, labels: Tensor) -> Cell:
        for name, model in self.models.items():
            model.bank.revert(self.start[name])
        safe = self.models["safe"].step(features)
        assert safe.frozen is not None
        return Cell(
            _accuracy(self.models["frozen"].predict(features).labels, labels),
            _accuracy(self.models["paper"].step(features).labels, labels),
            _accuracy(safe.frozen.argmax(1), labels),
            _accuracy(safe.labels, labels),
            _accuracy(self.models["mixed"].step(features).labels, labels),
        )


def _accuracy(answers: Tensor, labels: Tensor) -> float:
    return 100 * float((answers == labels).double().mean())


def _mean(cells: list[Cell]) -> Cell:
    return Cell(*torch.tensor(cells, dtype=torch.float64).mean(0).tolist())


def _line(name: str, order: str, cell: Cell) -> str:
    numbers = " | ".join(f"{value:.1f}" for value in cell)
    return f"| {name} | {order} | {numbers} | {cell.safe - cell.frozen:+.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS)
    parser.add_argument("--limit", type=int, default=None, help="the most queries of a stream")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    print("| target | order | frozen | paper | transform | safe | mixed | safe - frozen |")
    print("|---|---|---|---|---|---|---|---|")
    for path in options.files:
        domains = read(path)
        classes = 1 + max(int(labels.max()) for _, labels in domains.values())
        averages: dict[str, list[Cell]] = {order: [] for order in options.orders}
        for target, source in problems(domains):
            contest = Contest(source, classes)
            features, labels = domains[target]
            for order in options.orders:
                cells = []
                for seed in range(options.seeds):
                    for rows in orders(labels, order, seed):
                        met = rows[: options.limit]
                        cells.append(contest.meet(features[met], labels[met]))
                averages[order].append(_mean(cells))
                print(_line(f"{path.stem} {target}", order, averages[order][-1]), flush=True)
        for order, all_cells in averages.items():
            print(_line(f"**{path.stem}**", order, _mean(all_cells)), flush=True)


if __name__ == "__main__":
    main()
