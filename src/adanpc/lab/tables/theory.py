"""Tables of the paper's propositions: bounds beside simulations, and the split of a real bank."""

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
    """One task per setting, with all of its seeds."""
    size = "full" if scale.name in ("full", "large") else "reduced"
    tasks: list[Task] = []
    for entry in plan(size):
        if entry["seed"] == 0:
            parameters = {name: value for name, value in entry.items() if name != "seed"}
            tasks.append(Simulate(parameters, SCALES[size].seeds))
    return tasks


def simulations(results: Results) -> tuple[Parts, list[str]]:
    """A chart for each quantity that a proposition varies, and what the records say about the paper's claims."""
    draws: list[dict[str, Any]] = []
    for record in results.all_of(simulations_plan(results.scale)):
        draws += record["draws"]
    if not draws:
        return (), []
    return charts(draws), list(findings(draws))


def split_task(scale: Scale, target: str) -> SplitOfBank:
    """The task for one angle, on a model that is trained on all other angles."""
    return SplitOfBank(Trained(scale.spec("rotated-mnist", (target,), "erm")))


def splits_plan(scale: Scale) -> list[Task]:
    """One task per angle."""
    return [split_task(scale, target) for target in DIGITS.domains]


def splits(results: Results) -> tuple[Parts, list[str]]:
    """The split with the smallest bound, beside the split that a joint vote has by itself."""
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
        "Rotated MNIST: neighbors of each kind that minimize the bound of Proposition 3, and accuracy on held-out "
        "target images"
    )
    note = (
        "Labels of admitted rows are the bank's own answers, so the estimated gap says nothing about the true labels."
    )
    return (Sheet(title, QUANTITIES, tuple(rows), "", ""), *drawn), [note]


def _cells(record: Mapping[str, Any]) -> tuple[Cell, ...]:
    """The cells of a row in the order of ``QUANTITIES``; the accuracy of a split may be missing."""
    accuracy = record["accuracy"]
    numbers = [record["k_s"], record["k_u"], record["n_s"], record["n_u"], record["joint"]]
    numbers += [accuracy["joint"], accuracy.get("split")]
    cells = []
    for number in numbers:
        if number is None:
            cells.append(Cell())
        else:
            cells.append(Cell(Value(float(number))))
    return tuple(cells)


def _split(record: Mapping[str, Any]) -> Split:
    """The split that a record describes."""
    known = record["known"]
    names = [field.name for field in fields(Assumptions)]
    constants = {name: known[name] for name in names if name in known}
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
        "and with both: the excess error of votes beside the bound as k, n_s and n_u vary. The scales full and large "
        "have 30 seeds in 2 and in 8 dimensions, the others 8 seeds in 2 dimensions.",
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
