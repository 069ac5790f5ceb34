"""The propositions: bounds beside simulations, and the split of a real bank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value
from adanpc.lab.sweep.subjects import Trained
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Parts, Results, Row, Table
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
    tasks: list[Task] = []
    for entry in plan(size):
        if entry["seed"] == 0:
            parameters = {name: value for name, value in entry.items() if name != "seed"}
            tasks.append(Simulate(parameters, SCALES[size].seeds))
    return tasks


def simulations(results: Results) -> tuple[Parts, list[str]]:
    """One chart for each quantity that a proposition varies, and what the records say of the paper's claims."""
    draws: list[dict[str, Any]] = []
    for record in results.all_of(simulations_plan(results.scale)):
        draws += record["draws"]
    if not draws:
        return (), []
    return charts(draws), list(findings(draws))


def split_task(scale: Scale, target: str) -> SplitOfBank:
    """On a model that was trained on all other angles."""
    return SplitOfBank(Trained(scale.spec("rotated-mnist", (target,), "erm")))


def splits_plan(scale: Scale) -> list[Task]:
    """One bank for each angle."""
    return [split_task(scale, target) for target in DIGITS.domains]


def splits(results: Results) -> tuple[Parts, list[str]]:
    """The split with the least bound, beside the one that a joint vote has by itself."""
    rows: list[Row] = []
    drawn: list[Chart] = []
    for target in DIGITS.domains:
        record = results.of(split_task(results.scale, target))
        if record is None:
            continue
        rows.append((target, _cells(record)))
        if not drawn:  # one target is enough to see the shape of the bound
            drawn.append(split_chart(_split(record)))
    title = (
        "Rotated MNIST: neighbors of each kind with the least bound of Proposition 3, and accuracy on held-out target"
    )
    note = (
        "Labels of admitted rows are the bank's own answers, so the estimated gap says nothing about the true labels."
    )
    return (Sheet(title, QUANTITIES, tuple(rows), "", ""), *drawn), [note]


def _cells(record: Mapping[str, Any]) -> tuple[Cell, ...]:
    """In the order of ``QUANTITIES``; without a split there is no accuracy of one."""
    numbers = [record["k_s"], record["k_u"], record["n_s"], record["n_u"], record["joint"]]
    numbers += [record["accuracy"]["joint"], record["accuracy"].get("split")]
    return tuple(Cell(None if number is None else Value(float(number))) for number in numbers)


def _split(record: Mapping[str, Any]) -> Split:
    constants = {
        field.name: record["known"][field.name] for field in fields(Assumptions) if field.name in record["known"]
    }
    return Split(
        k_s=record["k_s"],
        k_u=record["k_u"],
        n_s=record["n_s"],
        n_u=record["n_u"],
        joint=record["joint"],
        known=Assumptions(**constants),
    )


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
        "AdaNPC adapts to one angle; the constants of the bound are then estimated from its bank.",
        splits_plan,
        splits,
        ("rotated-mnist",),
        uses=("steps", "batch", "images"),
    ),
]
