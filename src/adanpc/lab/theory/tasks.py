"""Tasks of the theory: simulations, and the best split of a real bank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from adanpc import core
from adanpc.core import MemoryBank
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.subjects import ALL, Extent, Subject, Trained, Workspace
from adanpc.lab.sweep.task import STARTING, Task, Train
from adanpc.lab.theory.bank import split_of_bank
from adanpc.lab.theory.simulate import measure

SECONDS_PER_ROW = 5e-5  # approximate, for all queries of one seed


@dataclass(frozen=True)
class Simulate(Task):
    """Simulates one setting, once for each seed.

    Args:
        parameters: an entry of ``simulate.plan`` without its seed.
        seeds: the number of seeds.
    """

    parameters: Mapping[str, Any]
    seeds: int

    kind: ClassVar[str] = "simulate"

    def document(self) -> dict[str, Any]:
        """Returns every field."""
        return {"parameters": dict(self.parameters), "seeds": self.seeds}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Returns one entry for each seed."""
        return {"draws": [measure({**self.parameters, "seed": seed}) for seed in range(self.seeds)]}

    def effort(self, costs: CostModel) -> float:
        """Returns an estimate of the seconds, by the number of rows."""
        rows: int = self.parameters["n_s"] + self.parameters["n_u"]
        return SECONDS_PER_ROW * self.seeds * rows


@dataclass(frozen=True)
class SplitOfBank(Task):
    """Computes the split that Proposition 3 recommends for the bank that AdaNPC has filled on a target.

    Args:
        subject: the source model.
        k: the number of neighbors that vote, source and target together.
        extent: how much of the data is used.
    """

    subject: Subject
    k: int = 10
    extent: Extent = ALL

    kind: ClassVar[str] = "split"

    def document(self) -> dict[str, Any]:
        """Returns every field."""
        return {"subject": self.subject.document(), "k": self.k, "extent": self.extent.document()}

    def data(self) -> tuple[str, ...]:
        """Returns the data sets of the subject."""
        return self.subject.reads()

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Returns the split with its constants, and the accuracy of the vote with it and without it."""
        scene = self.subject.scene(workspace, self.extent)
        stream = scene.seen(scene.targets[0], "features")
        held_out = scene.seen(scene.held[0], "features")
        bank = MemoryBank(scene.source.model.dim, scene.source.model.classes)
        classifier = core.AdaNPC(bank, k=self.k)
        classifier.learn(scene.source.features, scene.source.labels)
        classifier.step(stream.take(range(len(stream))))  # in one batch, since the batch size does not matter
        split = split_of_bank(bank, self.k)
        queries = held_out.take(range(len(held_out)))
        accuracy = {"joint": _accuracy(classifier, queries, held_out.labels)}
        if split.k_s > 0 and split.k_u > 0:  # a vote by a fixed split needs both kinds
            split_vote = core.AdaNPC(bank, k_source=split.k_s, k_target=split.k_u)
            accuracy["split"] = _accuracy(split_vote, queries, held_out.labels)
        return {**asdict(split), "accuracy": accuracy, "queries": len(held_out)}

    def effort(self, costs: CostModel) -> float:
        """Returns the seconds to read data and model; the rest is shared."""
        return STARTING

    def shared(self, costs: CostModel) -> Mapping[str, float]:
        """Returns the seconds for the features of all images."""
        return costs.encoding(self.subject.reading(), self.extent)

    def prerequisite(self) -> Task | None:
        """Returns the training of the subject, unless its model is published."""
        return Train(self.subject) if isinstance(self.subject, Trained) else None


def _accuracy(classifier: core.AdaNPC, queries: Tensor, labels: Tensor) -> float:
    """Returns the percentage of correct answers."""
    answers = classifier.predict(queries).probs.argmax(1)
    return 100 * (answers == labels).float().mean().item()
