"""Galleries: queries beside the rows that answered them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adanpc.lab.data.domain import Domain, some, split
from adanpc.lab.show.exhibit import Gallery, Picture, Question
from adanpc.lab.sweep.subjects import Extent, Frozen, Trained
from adanpc.lab.sweep.task import Task
from adanpc.lab.sweep.witness import Witness
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Benchmark, Found, Parts, Table

ENCODER = "efficientnet-lite0"
EACH = 4  # right and wrong answers of each target
SHOWN = 8  # neighbors


def witness(benchmark: Benchmark, scale: Scale, target: str) -> Witness:
    """Photos through a published encoder; digits through one that is trained."""
    if benchmark.data == "rotated-mnist":
        return Witness(Trained(scale.spec(benchmark.data, (target,), "erm")), EACH)
    extent = Extent(scale.images, scale.images, recalled=1)  # a gallery looks at no source images but neighbors
    return Witness(Frozen(benchmark.data, (target,), scale.encoder or ENCODER, head="untrained"), EACH, extent=extent)


def plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """One task for each target."""
    return [witness(benchmark, scale, target) for target in benchmark.domains]


def show(benchmark: Benchmark, found: Found) -> tuple[Parts, list[str]]:
    """One gallery for each target."""
    if benchmark.data in found.absent:
        return (), ["The pictures of a gallery are read from the data, which are not here."]
    made = [(target, witness(benchmark, found.scale, target)) for target in benchmark.domains]
    known = [(target, task, record) for target, task in made if (record := found(task))]
    galleries = tuple(_gallery(benchmark, found, target, task, record) for target, task, record in known)
    return galleries, [_effect([record for _, _, record in known])] if known else []


def _effect(records: Sequence[Mapping[str, Any]]) -> str:
    """What the removals did, counted."""
    asked = [question for record in records for question in record["questions"] if question["after"]]
    mended = sum(max(range(len(each["after"])), key=each["after"].__getitem__) == each["label"] for each in asked)
    return (
        f"An expert who removes up to five neighbors of the class wrongly given mends {mended} of these {len(asked)} "
        "wrong answers. The expert knows the label; removals last in a bank that is in use, here they are undone."
    )


def _gallery(benchmark: Benchmark, found: Found, target: str, task: Witness, record: Mapping[str, Any]) -> Gallery:
    data = found.workspace.data(benchmark.data, 0)
    met, known = _domains(benchmark, found, target, task)
    questions = tuple(_question(each, met, known, data.classes) for each in record["questions"])
    title = f"{benchmark.title}, target {target}: {record['accuracy']:.1f} % of {record['queries']:,} right"
    return Gallery(title, questions)


def _domains(benchmark: Benchmark, found: Found, target: str, task: Witness) -> tuple[Domain, list[tuple[Domain, int]]]:
    """The target as it was met, and source rows by id: a domain and the row in it. Drawn as the scene draws them."""
    data, limit = found.workspace.data(benchmark.data, 0), getattr(task.subject, "spec", None)
    images = None if limit is None else limit.images
    parts = {name: split(some(data[name], images, 0), 0)[0] for name in benchmark.domains}
    known = [(some(part, task.extent.rows, 0)) for name, part in parts.items() if name != target]
    return some(parts[target], task.extent.images, 0), [(part, row) for part in known for row in range(len(part))]


def _question(
    question: Mapping[str, Any], met: Domain, known: list[tuple[Domain, int]], classes: Sequence[str]
) -> Question:
    probs, removed = question["probs"], set(question["removed"])
    answer = max(range(len(probs)), key=probs.__getitem__)
    verdict = f"{classes[answer]} ({probs[answer]:.0%}), is {classes[question['label']]}"
    if question["after"]:
        after = question["after"]
        best = max(range(len(after)), key=after.__getitem__)
        verdict += f"; after removing {len(removed)}: {classes[best]} ({after[best]:.0%})"
    neighbors = []
    for each in question["neighbors"][:SHOWN]:
        domain, row = known[each["id"]]
        mark = " (removed)" if each["id"] in removed else ""
        caption = f"{classes[each['label']]}, {domain.name}, {each['similarity']:.2f}{mark}"
        neighbors.append(Picture(picture(domain.images[row]), caption))
    query = Picture(picture(met.images[question["row"]]), f"{met.name}: {classes[question['label']]}")
    return Question(query, tuple(neighbors), verdict)


def picture(image: torch.Tensor) -> npt.NDArray[np.uint8]:
    """An image (C, H, W) of bytes or of floats in [0, 1], as (H, W, 3) of bytes."""
    image = image if image.dtype == torch.uint8 else (255 * image.clamp(0, 1)).round().to(torch.uint8)
    return np.ascontiguousarray(image.expand(3, -1, -1).permute(1, 2, 0).numpy())


TABLES = [
    Table(
        f"gallery-{data}",
        f"Neighbors of right and wrong predictions on {BENCHMARKS[data].title}",
        "Figures 6, 9 and 10 (fig:main_class, fig:succ_app, fig:fail_app)",
        "A vote of the ten nearest source rows; for wrong answers, the vote after an expert removed up to five rows.",
        partial(plan, BENCHMARKS[data]),
        partial(show, BENCHMARKS[data]),
        (data,),
        uses=("images",) if data == "pacs" else ("steps", "batch", "images"),
    )
    for data in ("pacs", "rotated-mnist")
]
