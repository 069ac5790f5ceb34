"""The theory as tasks: simulations, and the split of a real bank."""

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

SECONDS_PER_ROW = 5e-5  # about, for all queries of one seed


@dataclass(frozen=True)
class Simulate(Task):
    """One setting of a simulation, drawn again for each seed.

    Args:
        parameters: an entry of ``simulate.plan`` without its seed.
        seeds: how many seeds are drawn.
    """

    parameters: Mapping[str, Any]
    seeds: int

    kind: ClassVar[str] = "simulate"

    def document(self) -> dict[str, Any]:
        """Every field."""
        return {"parameters": dict(self.parameters), "seeds": self.seeds}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """One entry for each seed."""
        return {"draws": [measure({**self.parameters, "seed": seed}) for seed in range(self.seeds)]}

    def effort(self, costs: CostModel) -> float:
        """By rows and queries."""
        rows: int = self.parameters["n_s"] + self.parameters["n_u"]
        return SECONDS_PER_ROW * self.seeds * rows


@dataclass(frozen=True)
class SplitOfBank(Task):
    """What Proposition 3 asks of the bank that AdaNPC has filled on a target.

    Args:
        subject: the source model.
        k: how many neighbors vote, source and target together.
        extent: how much of the data is used.
    """

    subject: Subject
    k: int = 10
    extent: Extent = ALL

    kind: ClassVar[str] = "split"

    def document(self) -> dict[str, Any]:
        """Every field."""
        return {"subject": self.subject.document(), "k": self.k, "extent": self.extent.document()}

    def data(self) -> tuple[str, ...]:
        """Those of the subject."""
        return self.subject.reads()

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """The split with its constants, and how right the votes were with it and without."""
        scene = self.subject.scene(workspace, self.extent)
        stream = scene.seen(scene.targets[0], "features")
        held_out = scene.seen(scene.held[0], "features")
        bank = MemoryBank(scene.source.model.dim, scene.source.model.classes)
        classifier = core.AdaNPC(bank, k=self.k)
        classifier.learn(scene.source.features, scene.source.labels)
        classifier.step(stream.take(range(len(stream))))
        split = split_of_bank(bank, self.k)
        queries = held_out.take(range(len(held_out)))
        accuracy = {"joint": _accuracy(classifier, queries, held_out.labels)}
        if split.k_s > 0 and split.k_u > 0:
            split_vote = core.AdaNPC(bank, k_source=split.k_s, k_target=split.k_u)
            accuracy["split"] = _accuracy(split_vote, queries, held_out.labels)
        return {**asdict(split), "accuracy": accuracy, "queries": len(held_out)}

    def effort(self, costs: CostModel) -> float:
        """Features of all images."""
        return STARTING + costs.features(self.subject.reading(), self.extent)

    def prerequisite(self) -> Task | None:
        """Training, if the model is not published."""
        return Train(self.subject) if isinstance(self.subject, Trained) else None


def _accuracy(classifier: core.AdaNPC, queries: Tensor, labels: Tensor) -> float:
    """The share of right answers, in percent."""
    answers = classifier.predict(queries).probs.argmax(1)
    return 100 * (answers == labels).float().mean().item()
