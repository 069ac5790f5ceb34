"""Does adapting help, and does it ever hurt? The library's default beside what it is compared with, on every stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from adanpc.lab.data.corrupted import title
from adanpc.lab.data.corruptions import CORRUPTIONS
from adanpc.lab.show.exhibit import Cell, Sheet, Value, value
from adanpc.lab.sweep.disturbance import ATTACKS, Attack, Foreign, Intrude
from adanpc.lab.sweep.subjects import Extent, Frozen, Subject, Trained
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables.corruptions import CIFAR
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Parts, Results, Row, Table, mean_of
from adanpc.lab.train.spec import Spec


class Method(NamedTuple):
    """A test-time method with its settings."""

    name: str
    settings: Mapping[str, Any] = {}


FROZEN = "frozen vote"
SAFE = "safe"
TRANSFORM = "transform"  # not run by itself: it is the frozen answer of the preset "safe"
METHODS: Mapping[str, Method] = {
    FROZEN: Method("knn", {"k": 25}),
    "paper": Method("adanpc"),
    "linear head": Method("source"),
    "T3A": Method("t3a"),
    "reset": Method("adanpc-reset"),
    "ASR": Method("adanpc-asr"),
    "PeTTA": Method("adanpc-petta"),
    SAFE: Method("adanpc-safe"),
    "safe, mixed": Method("adanpc-safe", {"stream": "mixed"}),
}
COLUMNS = (*METHODS, TRANSFORM)
LEARNING = tuple(name for name in METHODS if name not in (FROZEN, "linear head"))  # those that learn from a stream

PACS = BENCHMARKS["pacs"]
MNIST = BENCHMARKS["rotated-mnist"]
ENCODERS = ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
DISTURBED_ENCODER = ENCODERS[0]  # foreign queries and attacks are met with one encoder
ORDERS_OF_ONE_TARGET = {
    "random": "iid",
    "sorted": "sorted",
    "Dirichlet 0.1": "correlated",
    "label shift 1:10": "label_shift",
}
ONE_CLASS = "one class"
ORDERS_OF_ALL_TARGETS = {"successive": "successive", "mixed": "mixed", "recurring 5 times": "recurring"}
PACS_CLASSES = 7
SEVERITIES = (1, 5)
IMAGES_OF_CORRUPTION = 1000  # at most
ROWS_PER_IMAGE = 10  # in the bank, for each of these images
DIGITS_OF_ANGLE = 5000  # at most, of which a fifth is held out
STEPS = 1000  # of the training on upright digits, at most
RECALLED = 300  # source images
FOREIGN: tuple[Foreign, ...] = ("noise", "digits", "unknown class")
GROUPS = (*ENCODERS, "rotated-mnist", *(f"cifar-10-c-{severity}" for severity in SEVERITIES), "foreign", "attacks")
ALLOWED_LOSS = 0.5  # points that a cell may be below the frozen vote
FOREIGN_IN_WORDS = (
    "foreign that joined the bank; that voted: had any part in the answer to a later query; "
    "that decided: without that row alone, such an answer would have been another."
)


class Scenario(NamedTuple):
    """Where all methods are compared: a source model, what it meets, and how that arrives.

    Args:
        group: what it is shown with.
        order: how samples arrive, in words.
        target: what is met, in words.
        subject: the source model.
        stream: by name.
        extent: of the data.
        turns: seeds of the order of arrival, in groups that are run one after another: a table that is stopped early
            has the first group of every scenario.
    """

    group: str
    order: str
    target: str
    subject: Subject
    stream: str
    extent: Extent
    turns: tuple[tuple[int, ...], ...]

    @property
    def seeds(self) -> list[int]:
        """All seeds."""
        return [seed for turn in self.turns for seed in turn]

    def task(self, name: str, seed: int) -> Adapt:
        """A method here."""
        method = METHODS[name]
        return Adapt(
            self.subject,
            method.name,
            stream=self.stream,
            settings=method.settings,
            extent=self.extent,
            seed=seed,
        )


def _some_of(names: Iterable[str], scale: Scale) -> list[str]:
    """Those of the names that are asked for; all of them if none is."""
    names = list(names)
    asked = {name.lower() for name in scale.only}
    wanted = [name for name in names if name.lower() in asked]
    return wanted or names


def scenarios(scale: Scale) -> list[Scenario]:
    """Every scenario of the groups that are wanted."""
    found: list[Scenario] = []
    for group in _some_of(GROUPS, scale):
        if group in ENCODERS:
            found += _pacs(group, scale)
        elif group == "rotated-mnist":
            found.append(_digits(scale))
        elif group.startswith("cifar"):
            found += _cifar(group, int(group[-1]), scale)
    return found


def _pacs(encoder: str, scale: Scale) -> list[Scenario]:
    """A published encoder on PACS: each domain as the target of the others, and as the source of the others."""
    extent = Extent(scale.images, scale.images, RECALLED, whole=True)
    turns = _one_by_one(scale.seeds)
    all_classes = (tuple(range(PACS_CLASSES)),)  # the seed of such a stream is its class
    found = []
    for target in PACS.domains:
        subject = Frozen(PACS.data, (target,), encoder)
        for order, stream in ORDERS_OF_ONE_TARGET.items():
            found.append(Scenario(encoder, order, target, subject, stream, extent, turns))
        found.append(Scenario(encoder, ONE_CLASS, target, subject, "one_class", extent, all_classes))
    for source in PACS.domains:
        others = tuple(name for name in PACS.domains if name != source)
        subject = Frozen(PACS.data, others, encoder)
        for order, stream in ORDERS_OF_ALL_TARGETS.items():
            found.append(Scenario(encoder, order, f"after {source}", subject, stream, extent, turns))
    return found


def _one_by_one(seeds: int) -> tuple[tuple[int, ...], ...]:
    """A turn for each seed."""
    return tuple((seed,) for seed in range(seeds))


def _digits(scale: Scale) -> Scenario:
    """A small network trained on upright digits, led through the angles."""
    images = DIGITS_OF_ANGLE if scale.images is None else min(DIGITS_OF_ANGLE, scale.images)
    steps = min(STEPS, scale.steps)
    spec = Spec(MNIST.data, MNIST.domains[1:], "erm", steps=steps, images=images)
    extent = Extent(recalled=RECALLED)
    turns = _one_by_one(scale.seeds)
    return Scenario("rotated-mnist", "successive", "all angles", Trained(spec), "successive", extent, turns)


def _cifar(group: str, severity: int, scale: Scale) -> list[Scenario]:
    """A published network, one corruption after another, each from a fresh start."""
    images = IMAGES_OF_CORRUPTION if scale.images is None else min(IMAGES_OF_CORRUPTION, scale.images)
    extent = Extent(images, ROWS_PER_IMAGE * images, RECALLED, whole=True)
    turns = _one_by_one(scale.seeds)
    found = []
    for corruption in CORRUPTIONS:
        domain = title(corruption, severity)
        known = (CIFAR.clean, "train")
        subject = Frozen(CIFAR.data, (domain,), CIFAR.encoder, CIFAR.weights, "own", known=known)
        found.append(Scenario(group, "random", corruption, subject, "iid", extent, turns))
    return found


def _disturbed(target: str) -> Frozen:
    """The source model that meets foreign queries and attacks."""
    return Frozen(PACS.data, (target,), DISTURBED_ENCODER)


def _intrusion(target: str, foreign: Foreign, name: str, scale: Scale, seed: int) -> Intrude:
    method = METHODS[name]
    extent = Extent(scale.images, scale.images, RECALLED, whole=True)
    return Intrude(_disturbed(target), method.name, foreign, method.settings, extent, seed)


def _attack(target: str, attack: str, name: str, scale: Scale, seed: int) -> Attack:
    method = METHODS[name]
    extent = Extent(scale.images, scale.images, RECALLED, whole=True)
    return Attack(_disturbed(target), method.name, attack, method.settings, extent, seed)


def plan(scale: Scale) -> list[Task]:
    """Every wanted method in every wanted scenario; the first seed of everything comes first."""
    methods = _some_of(METHODS, scale)
    wanted = scenarios(scale)
    tasks: list[Task] = []
    for turn in range(scale.seeds):
        for scenario in wanted:
            for seeds in scenario.turns[turn : turn + 1]:
                tasks += [scenario.task(name, seed) for seed in seeds for name in methods]
        tasks += _disturbances(scale, methods, turn)
    return tasks


def _disturbances(scale: Scale, methods: Sequence[str], seed: int) -> list[Task]:
    """Foreign queries and attacks, with one seed."""
    groups = _some_of(GROUPS, scale)
    tasks: list[Task] = []
    for target in PACS.domains:
        for name in methods:
            if "foreign" in groups:
                tasks += [_intrusion(target, foreign, name, scale, seed) for foreign in FOREIGN]
            if "attacks" in groups and name in LEARNING:
                tasks += [_attack(target, attack, name, scale, seed) for attack in ATTACKS]
    return tasks


# What is shown ---------------------------------------------------------------------------------------------------

Record = Mapping[str, Any]
Measure = Callable[[Record], float | None]


def _accuracy(record: Record) -> float | None:
    return float(record["average"])


def _recorded(name: str) -> Measure:
    """The number of this name in a record; records of an earlier version may be without it."""
    return lambda record: record.get(name)


def _wrong_rows(record: Record) -> float | None:
    """The share of the rows that joined, in percent, whose label is wrong; none joined: 0."""
    joined = record.get("joined")
    if joined is None:
        return None
    return 100 * int(joined["wrong"]) / max(int(joined["rows"]), 1)


def _source_change(record: Record) -> float | None:
    """The accuracy on held-out source images after the stream, less that before."""
    after = list(record["source"]["after"].values())
    return float(after[-1] - record["source"]["before"])


class View(NamedTuple):
    """One measure of all scenarios.

    Args:
        title: in words.
        measure: of a record.
        unit: of the numbers.
        worst_seed: the lowest of the seeds is shown instead of their mean.
    """

    title: str
    measure: Measure
    unit: str = "accuracy in %"
    worst_seed: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """What is compared; only accuracies are known of the transform alone."""
        return COLUMNS if self.measure is _accuracy else tuple(METHODS)


VIEWS = (
    View("Accuracy", _accuracy),
    View("Accuracy with the worst seed, or of the worst class", _accuracy, worst_seed=True),
    View("Accuracy in the worst tenth of windows of 100 answers", _recorded("worst_tenth")),
    View("Rows that joined with a wrong label", _wrong_rows, "% of the rows that joined"),
    View("Expected calibration error", _recorded("calibration_error"), "points"),
    View("Source: accuracy on held-out images after the stream, less before", _source_change, "points"),
)


def _numbers(results: Results, scenario: Scenario, column: str, measure: Measure) -> list[float]:
    """A measure of a column in a scenario, for each seed that has a record; none until the whole first turn has."""
    method = column
    if column == TRANSFORM:
        method = SAFE
        measure = _recorded("frozen")
    first = results.all_of(scenario.task(method, seed) for seed in scenario.turns[0])
    if len(first) < len(scenario.turns[0]):
        return []
    found = [measure(record) for record in results.all_of(scenario.task(method, seed) for seed in scenario.seeds)]
    return [number for number in found if number is not None]


def _shown_number(results: Results, scenario: Scenario, column: str, view: View) -> float | None:
    """What a view shows of a scenario: the mean over seeds, or the worst of them."""
    numbers = _numbers(results, scenario, column, view.measure)
    if not numbers:
        return None
    return min(numbers) if view.worst_seed else sum(numbers) / len(numbers)


def show(results: Results) -> tuple[Parts, list[str]]:
    """Averages of every measure, accuracies in every scenario, then digits by angle, foreign queries and attacks."""
    found = scenarios(results.scale)
    sheets = [_averages(results, found, view) for view in VIEWS]
    for group in GROUPS:
        here = [scenario for scenario in found if scenario.group == group]
        if len(here) > 1:
            sheets.append(_each_scenario(results, group, here))
    groups = _some_of(GROUPS, results.scale)
    if "rotated-mnist" in groups:
        sheets.append(_angles(results))
    if "foreign" in groups:
        sheets.append(_foreign(results))
    if "attacks" in groups:
        sheets.append(_attacks(results))
    return tuple(sheets), _notes(results, found)


def _averages(results: Results, found: Sequence[Scenario], view: View) -> Sheet:
    """A view of each group and order, averaged over what is met; nothing where a part of it is missing."""
    rows: list[Row] = []
    kinds = dict.fromkeys((scenario.group, scenario.order) for scenario in found)
    for group, order in kinds:
        here = [scenario for scenario in found if (scenario.group, scenario.order) == (group, order)]
        cells = []
        for column in view.columns:
            cells.append(Cell(_mean([_shown_number(results, scenario, column, view) for scenario in here])))
        rows.append((f"{group}, {order}", tuple(cells)))
    return Sheet(f"{view.title}, on average", view.columns, tuple(rows), view.unit, best="")


def _mean(numbers: Sequence[float | None]) -> Value | None:
    """The mean alone, or nothing if one is missing; numbers of different targets have no common error."""
    mean = mean_of(numbers)
    return None if mean is None else Value(mean)


def _each_scenario(results: Results, group: str, here: Sequence[Scenario]) -> Sheet:
    """Accuracies in every scenario of a group, over seeds."""
    rows: list[Row] = []
    for scenario in here:
        cells = [Cell(value(_numbers(results, scenario, column, _accuracy))) for column in COLUMNS]
        rows.append((f"{scenario.order}, {scenario.target}", tuple(cells)))
    return Sheet(f"Accuracy, {group}", COLUMNS, tuple(rows), best="")


def _angles(results: Results) -> Sheet:
    """Accuracies on each angle of rotated digits."""
    scenario = _digits(results.scale)
    rows: list[Row] = []
    for angle in MNIST.domains[1:]:
        cells = []
        for name in METHODS:
            cells.append(Cell(value(_numbers(results, scenario, name, _on_domain(angle)))))
        rows.append((f"{angle}°", tuple(cells)))
    title = "Rotated digits in succession, accuracy on each angle as it is met"
    return Sheet(title, tuple(METHODS), tuple(rows), best="")


def _on_domain(name: str) -> Measure:
    """The accuracy on one of the domains of a stream."""
    return lambda record: record["domains"].get(name)


def _foreign(results: Results) -> Sheet:
    """What foreign queries do, averaged over targets and seeds."""
    scale = results.scale
    rows: list[Row] = []
    for foreign in FOREIGN:
        for name in METHODS:
            records = _on_every_target(results, partial(_intrusion, foreign=foreign, name=name, scale=scale))
            cells = [_over(records, measure) for measure in _FOREIGN_MEASURES.values()]
            rows.append((f"{foreign}, {name}", tuple(cells)))
    title = f"Foreign queries among those of PACS, {DISTURBED_ENCODER}, on average"
    return Sheet(title, tuple(_FOREIGN_MEASURES), tuple(rows), "%", "")


def _on_every_target(results: Results, task_for: Callable[..., Task]) -> list[Record]:
    """The records of a disturbance on all targets with all seeds; none until the first seed is complete.

    Args:
        results: where they are.
        task_for: the task, given ``target`` and ``seed``.
    """
    first = results.all_of(task_for(target=target, seed=0) for target in PACS.domains)
    if len(first) < len(PACS.domains):
        return []
    others = range(1, results.scale.seeds)
    return [*first, *results.all_of(task_for(target=target, seed=seed) for target in PACS.domains for seed in others)]


def _share_of_foreign(record: Record, what: str) -> float | None:
    """A count in a record as a share of the foreign queries, in percent."""
    count = record.get(what)  # records of an earlier version may be without it
    if count is None or not record["foreign"]:  # of a small target, an unknown class may have no images
        return None
    return 100 * float(count) / float(record["foreign"])


def _novelty(record: Record, what: str) -> float | None:
    """What a record says of novelty; None for methods that do not compute it."""
    novelty = record["novelty"]
    return None if novelty is None else float(novelty[what])


_FOREIGN_MEASURES: Mapping[str, Measure] = {  # by the heading of their column
    "accuracy without": _recorded("without"),
    "accuracy beside": _recorded("beside"),
    "native answers changed": _recorded("changed"),
    "foreign that joined": lambda record: _share_of_foreign(record, "voters"),
    "foreign that voted": lambda record: _share_of_foreign(record, "influential"),
    "foreign that decided": lambda record: _share_of_foreign(record, "decisive"),
    "AUROC of novelty": lambda record: _novelty(record, "auroc"),
    "foreign called so": lambda record: _novelty(record, "foreign"),
    "native called foreign": lambda record: _novelty(record, "native"),
}


def _over(records: Sequence[Record], measure: Measure) -> Cell:
    """A measure of all records, on average."""
    found = [measure(record) for record in records]
    return Cell(_mean([number for number in found if number is not None]))


def _attacks(results: Results) -> Sheet:
    """The accuracy on probes before and after each attack, averaged over targets and seeds, and where it fell most."""
    scale = results.scale
    rows: list[Row] = []
    for attack, inputs in ATTACKS.items():
        for name in LEARNING:
            records = _on_every_target(results, partial(_attack, attack=attack, name=name, scale=scale))
            differences = [float(record["after"] - record["before"]) for record in records]
            worst = Cell(Value(min(differences))) if differences else Cell()
            cells = (
                _over(records, _recorded("before")),
                _over(records, _recorded("after")),
                Cell(_mean(differences)),
                worst,
                _over(records, _recorded("changed")),
            )
            rows.append((f"{attack} ({inputs:,} inputs), {name}", cells))
    columns = ("accuracy before", "after", "difference", "worst difference", "answers changed")
    return Sheet(f"Attacks, {DISTURBED_ENCODER}, on average over PACS", columns, tuple(rows), "%", "")


def _notes(results: Results, found: Sequence[Scenario]) -> list[str]:
    """How often the default and the transform alone are below the frozen vote, and where most."""
    notes = [
        "frozen vote: 25 neighbors on raw features. transform: the preset safe with nothing learned from the stream.",
        "reset, ASR and PeTTA: the paper's rule with a way back to the source, see docs/methods.md.",
        FOREIGN_IN_WORDS,
    ]
    accuracy = VIEWS[0]
    for column in (SAFE, "safe, mixed", TRANSFORM):
        gaps = {}
        for scenario in found:
            ours = _shown_number(results, scenario, column, accuracy)
            frozen = _shown_number(results, scenario, FROZEN, accuracy)
            if ours is not None and frozen is not None:
                gaps[f"{scenario.group}, {scenario.order}, {scenario.target}"] = ours - frozen
        if gaps:
            below = sum(gap < -ALLOWED_LOSS for gap in gaps.values())
            lowest = min(gaps, key=lambda name: gaps[name])
            notes.append(
                f"{column}: more than {ALLOWED_LOSS} points below the frozen vote in {below} of {len(gaps)} cells; "
                f"the lowest is {lowest}, by {gaps[lowest]:+.1f}."
            )
    return notes


TABLES = [
    Table(
        "safety",
        "Does adapting help, and does it ever hurt?",
        "no counterpart",
        "Published encoders on PACS without fine-tuning, each domain as the target of the others (random, sorted by "
        "class, Dirichlet, label shift, one class at a time) and as the source of the others (successive, mixed, "
        f"recurring); a small network trained on upright digits for at most {STEPS:,} steps and led through at most "
        f"{DIGITS_OF_ANGLE * 4 // 5:,} digits of each angle; a ResNet-56 on at most {IMAGES_OF_CORRUPTION:,} images of "
        "each corruption of CIFAR-10. Images of PACS and CIFAR-10-C are met as a whole, banks hold four fifths of each "
        "source domain, and a seed changes the order of arrival alone. Batches of 32.",
        plan,
        show,
        (PACS.data, MNIST.data, "cifar-10", "cifar-10-c"),
        uses=("seeds", "images"),
        rows=(*GROUPS, *METHODS),
    )
]
