"""Galleries: images of queries beside the images of the rows that voted on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adanpc.lab.data.domain import DataError, Domain, some, split
from adanpc.lab.show.exhibit import Gallery, Picture, Question
from adanpc.lab.sweep.explain import Explain
from adanpc.lab.sweep.subjects import Extent, Frozen, Trained
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Benchmark, Parts, Results, Table

ENCODER = "efficientnet-lite0"
EACH = 4  # right answers, and as many wrong ones, for each target
SHOWN = 8  # neighbors of each query


def task_for(benchmark: Benchmark, scale: Scale, target: str) -> Explain:
    """The task for one target; photos use a published encoder, digits one that is trained."""
    if not benchmark.photos:
        return Explain(Trained(scale.spec(benchmark.data, (target,), "erm")), EACH)
    subject = Frozen(benchmark.data, (target,), scale.encoder or ENCODER, head="untrained")
    extent = Extent(scale.images, scale.images, recalled=1)  # no held-out source images are shown
    return Explain(subject, EACH, extent=extent)


def plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """One task per target."""
    return [task_for(benchmark, scale, target) for target in benchmark.domains]


def show(benchmark: Benchmark, results: Results) -> tuple[Parts, list[str]]:
    """One gallery per target."""
    if benchmark.data in results.absent:
        return (), ["The pictures of a gallery are read from the data, which are not here."]
    try:
        results.workspace.data(benchmark.data, 0)
    except DataError as error:
        return (), [f"The pictures of a gallery are read from the data: {error}."]
    galleries = []
    shown = []
    notes = []
    for target in benchmark.domains:
        task = task_for(benchmark, results.scale, target)
        record = results.of(task)
        if record is None:
            continue
        images = Images(benchmark, results, target, task)
        if images.match(record["questions"]):
            galleries.append(_gallery(benchmark.title, target, record, images))
            shown.append(record)
        else:
            notes.append(f"The record of {target} does not match the images in the data's folder, so it is not shown.")
    if shown:
        notes.insert(0, _effect(shown))
    return tuple(galleries), notes


def _effect(records: Sequence[Mapping[str, Any]]) -> str:
    """How many answers the removals corrected, in words."""
    revised = [question for record in records for question in record["questions"] if question["after"]]
    corrected = sum(_top(question["after"]) == question["label"] for question in revised)
    return (
        f"An expert who removes up to five neighbors of the wrongly given class corrects {corrected} of these "
        f"{len(revised)} wrong answers. The expert knows the label. In a bank in use removals last; here they are "
        "undone."
    )


def _top(probs: Sequence[float]) -> int:
    """The class with the highest probability; the first one of equals."""
    return max(range(len(probs)), key=lambda label: probs[label])


class Images:
    """The images that a record refers to, drawn from the data as the scene of its task drew them.

    Args:
        benchmark: the data set.
        results: where the data is.
        target: the target domain.
        task: the task whose record is shown.
    """

    def __init__(self, benchmark: Benchmark, results: Results, target: str, task: Explain) -> None:
        data = results.workspace.data(benchmark.data, 0)
        limit = task.subject.spec.images if isinstance(task.subject, Trained) else None
        self.classes = data.classes
        self.source: list[tuple[Domain, int]] = []  # the domain of each bank row, and its position there
        for name in benchmark.domains:
            domain = some(data[name], limit, 0)
            large, _ = split(domain, 0)
            if name == target:
                self.target = some(large, task.extent.images, 0)
            else:
                known = some(large, task.extent.rows, 0)
                self.source += [(known, row) for row in range(len(known))]

    def match(self, questions: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all rows and classes in the questions exist; the data may have changed since they were recorded."""
        return all(self._matches(question) for question in questions)

    def _matches(self, question: Mapping[str, Any]) -> bool:
        neighbors = question["neighbors"]
        if question["row"] >= len(self.target):
            return False
        if any(neighbor["id"] >= len(self.source) for neighbor in neighbors):
            return False
        labels = [question["label"], *(neighbor["label"] for neighbor in neighbors)]
        labels.append(len(question["probs"]) - 1)  # the last class that has a probability
        if question["after"]:
            labels.append(len(question["after"]) - 1)
        highest: int = max(labels)
        return highest < len(self.classes)


def _gallery(title: str, target: str, record: Mapping[str, Any], images: Images) -> Gallery:
    questions = tuple(_question(question, images) for question in record["questions"])
    about = f"{title}, target {target}: {record['accuracy']:.1f} % of {record['queries']:,} right"
    return Gallery(about, questions)


def _question(question: Mapping[str, Any], images: Images) -> Question:
    """A query with its neighbors and the answer that was given."""
    classes = images.classes
    label = classes[question["label"]]
    removed = set(question["removed"])
    verdict = f"{_answer(question['probs'], classes)}, is {label}"
    if question["after"]:
        verdict += f"; after removing {len(removed)}: {_answer(question['after'], classes)}"
    neighbors = []
    for neighbor in question["neighbors"][:SHOWN]:
        domain, row = images.source[neighbor["id"]]
        caption = f"{classes[neighbor['label']]}, {domain.name}, {neighbor['similarity']:.2f}"
        if neighbor["id"] in removed:
            caption += " (removed)"
        neighbors.append(Picture(picture(domain.images[row]), caption))
    query = Picture(picture(images.target.images[question["row"]]), f"{images.target.name}: {label}")
    return Question(query, tuple(neighbors), verdict)


def _answer(probs: Sequence[float], classes: Sequence[str]) -> str:
    """The class that was answered, with its probability."""
    top = _top(probs)
    return f"{classes[top]} ({probs[top]:.0%})"


def picture(image: torch.Tensor) -> npt.NDArray[np.uint8]:
    """An image (C, H, W) of bytes or of floats in [0, 1], as (H, W, 3) of bytes."""
    if image.dtype != torch.uint8:
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
    return np.ascontiguousarray(image.expand(3, -1, -1).permute(1, 2, 0).numpy())


USES = {"pacs": ("images",), "rotated-mnist": ("steps", "batch", "images")}  # sizes of a scale that matter
TABLES = [
    Table(
        f"gallery-{data}",
        f"Neighbors of right and wrong predictions on {BENCHMARKS[data].title}",
        "Figures 6, 9 and 10",
        "A vote of the ten nearest source rows; for wrong answers, the vote after an expert removed up to five rows.",
        partial(plan, BENCHMARKS[data]),
        partial(show, BENCHMARKS[data]),
        (data,),
        uses=uses,
    )
    for data, uses in USES.items()
]
