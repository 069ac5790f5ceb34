"""The propositions: bounds beside simulations, and the split of a real bank."""

from __future__ import annotations

from typing import Any

from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value
from adanpc.lab.sweep.subjects import Trained
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Found, Parts, Table
from adanpc.lab.theory.bank import Split, split_chart
from adanpc.lab.theory.bounds import Assumptions
from adanpc.lab.theory.charts import charts
from adanpc.lab.theory.claims import findings
from adanpc.lab.theory.simulate import SCALES, plan
from adanpc.lab.theory.tasks import Simulate, SplitOfBank

DIGITS = BENCHMARKS["rotated-mnist"]
QUANTITIES = ("k_s", "k_u", "n_s", "n_u", "joint k_u", "accuracy joint", "accuracy split")


def simulations_plan(scale: Scale) -> list[Task]:
    """Every setting, all seeds of it in one task."""
    size = "full" if scale.name in ("full", "large") else "reduced"
    seeds = SCALES[size].seeds
    return [
        Simulate({name: value for name, value in entry.items() if name != "seed"}, seeds)
        for entry in plan(size)
        if entry["seed"] == 0
    ]


def simulations(found: Found) -> tuple[Parts, list[str]]:
    """One chart for each quantity that a proposition varies, and what the records say of the paper's claims."""
    records = [found(task) for task in simulations_plan(found.scale)]
    draws: list[dict[str, Any]] = [draw for record in records if record for draw in record["draws"]]
    return (charts(draws), list(findings(draws))) if draws else ((), [])


def split_task(scale: Scale, target: str) -> SplitOfBank:
    """On a model that was trained on all other angles."""
    return SplitOfBank(Trained(scale.spec("rotated-mnist", (target,), "erm")))


def splits_plan(scale: Scale) -> list[Task]:
    """One bank for each angle."""
    return [split_task(scale, target) for target in DIGITS.domains]


def splits(found: Found) -> tuple[Parts, list[str]]:
    """The split with the least bound, beside the one that a joint vote has by itself."""
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    drawn: list[Chart] = []
    for target in DIGITS.domains:
        if record := found(split_task(found.scale, target)):
            known = {name: record[name] for name in ("k_s", "k_u", "n_s", "n_u", "joint")}
            accuracy = record["accuracy"]
            numbers = [*known.values(), accuracy["joint"], accuracy.get("split")]
            rows.append((target, tuple(Cell(None if number is None else Value(float(number))) for number in numbers)))
            drawn = drawn or [split_chart(Split(**known, known=Assumptions(**record["known"])))]
    title = (
        "Rotated MNIST: neighbors of each kind with the least bound of Proposition 3, and accuracy on held-out target"
    )
    note = (
        "Labels of admitted rows are the bank's own answers, so the estimated gap says nothing about the true labels."
    )
    return (Sheet(title, QUANTITIES, tuple(rows), "", ""), *drawn), [note]


TABLES = [
    Table(
        "theory",
        "The bounds of Propositions 1 to 3 beside simulations",
        "section Theory; the paper simulates nothing",
        "Binary problems with known regression functions, without shift, with covariate shift, with posterior shift "
        "and with both; excess error of votes beside the bound as k, n_s and n_u vary. Scales full and large have 30 "
        "seeds in 2 and in 8 dimensions, the others 8 seeds in 2 dimensions.",
        simulations_plan,
        simulations,
        (),
        uses=(),
    ),
    Table(
        "split",
        "How many source and target rows should vote",
        "Proposition 3",
        "AdaNPC meets one angle; the constants of the bound are then estimated from its bank.",
        splits_plan,
        splits,
        ("rotated-mnist",),
        uses=("steps", "batch", "images"),
    ),
]
