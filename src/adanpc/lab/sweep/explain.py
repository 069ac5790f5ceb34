"""Explained answers: which rows voted on a query, and what changes when an expert removes the wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from adanpc import core
from adanpc.core import Append, MemoryBank, Prediction, Restore, Veto
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.scene import Scene
from adanpc.lab.sweep.subjects import ALL, Extent, Subject, Trained, Workspace
from adanpc.lab.sweep.task import STARTING, Task, Train


@dataclass(frozen=True)
class Explain(Task):
    """Some right and some wrong answers of a vote, each with its neighbors, before and after a removal.

    For each wrong answer, an expert who knows the true label removes the neighbors of the wrongly given class, nearest
    first, up to ``removed`` of them.

    Args:
        subject: the source model.
        each: how many right and how many wrong answers to show, evenly spread over their confidence.
        k: neighbors that vote.
        removed: the most rows that the expert removes.
        extent: how much of the data is used.
    """

    subject: Subject
    each: int = 4
    k: int = 10
    removed: int = 5
    extent: Extent = ALL

    kind: ClassVar[str] = "witness"

    def document(self) -> dict[str, Any]:
        """Every field."""
        return {
            "subject": self.subject.document(),
            "each": self.each,
            "k": self.k,
            "removed": self.removed,
            "extent": self.extent.document(),
        }

    def data(self) -> tuple[str, ...]:
        """The data sets of the subject."""
        return self.subject.reads()

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """The chosen questions, the accuracy of the vote in percent, and the number of queries."""
        scene = self.subject.scene(workspace, self.extent)
        bank = MemoryBank(scene.source.model.dim, scene.source.model.classes)
        bank.apply(Append(scene.source.features, scene.source.labels))
        classifier = core.AdaNPC(bank, k=self.k)
        target = scene.seen(scene.targets[0], "features")
        answers = classifier.predict(torch.as_tensor(target.images))
        right = answers.probs.argmax(1) == target.labels
        chosen = [*_spread(answers, right, self.each), *_spread(answers, ~right, self.each)]
        questions = [self._question(scene, classifier, answers, row) for row in chosen]
        return {"questions": questions, "accuracy": 100 * right.float().mean().item(), "queries": len(right)}

    def _question(self, scene: Scene, classifier: core.AdaNPC, answers: Prediction, row: int) -> dict[str, Any]:
        """One query with its neighbors and, if it was answered wrongly, its answer after the expert's removal."""
        label = int(scene.targets[0].labels[row])
        probs = answers.probs[row]
        answer = int(probs.argmax())
        ids = answers.neighbors.ids[row].tolist()
        wrong: list[int] = []
        after = None
        if answer != label:
            misleading = [id_ for id_ in ids if int(scene.source.labels[id_]) == answer]
            wrong = misleading[: self.removed]
        if wrong:
            query = scene.seen(scene.targets[0], "features").images[row]
            after = _answer_without(classifier, torch.as_tensor(query)[None], wrong)
        similarities = answers.neighbors.similarity[row].tolist()
        weights = answers.weights[row].tolist()
        neighbors = [
            {"id": id_, "label": int(scene.source.labels[id_]), "similarity": similarity, "weight": weight}
            for id_, similarity, weight in zip(ids, similarities, weights, strict=True)
        ]
        return {
            "row": row,
            "label": label,
            "probs": probs.tolist(),
            "neighbors": neighbors,
            "removed": wrong,
            "after": after,
        }

    def effort(self, costs: CostModel) -> float:
        """Reads data and model; the rest is shared."""
        return STARTING

    def shared(self, costs: CostModel) -> Mapping[str, float]:
        """The features of all images."""
        return costs.encoding(self.subject.reading(), self.extent)

    def prerequisite(self) -> Task | None:
        """The training of the model; None for a published one."""
        return Train(self.subject) if isinstance(self.subject, Trained) else None


def _answer_without(classifier: core.AdaNPC, query: torch.Tensor, ids: list[int]) -> list[float]:
    """The answer to a query without these rows, which are put back afterward."""
    classifier.bank.apply(Veto(tuple(ids), "expert", "not what is seen"))
    try:
        return list(classifier.predict(query).probs[0].tolist())
    finally:
        classifier.bank.apply(Restore(tuple(ids), "expert", "end of the question"))


def _spread(answers: Prediction, wanted: torch.Tensor, count: int) -> list[int]:
    """At most ``count`` of the wanted queries, evenly spaced from the most to the least confident answer."""
    rows = wanted.nonzero()[:, 0]
    if not len(rows):
        return []
    confidence = answers.probs[rows].amax(1)
    ranked = rows[confidence.argsort(descending=True, stable=True)]
    places = torch.linspace(0, len(ranked) - 1, min(count, len(ranked))).round().long()
    return [int(row) for row in ranked[places]]
