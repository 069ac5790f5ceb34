"""Streams that were meant to do harm, or that do it by mistake: foreign queries among others, and attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc.core import Prediction
from adanpc.core.guard import FOREIGN
from adanpc.lab.adapt import Adapter, Source, find
from adanpc.lab.data.domain import Domain, some
from adanpc.lab.data.streams import Iid
from adanpc.lab.networks.features import features
from adanpc.lab.seeds import seed_of
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.quality import auroc
from adanpc.lab.sweep.scene import Scene
from adanpc.lab.sweep.subjects import Extent, Frozen, Workspace
from adanpc.lab.sweep.task import FEATURES, STARTING, Task, scene_of

DIGITS = ("rotated-mnist", "0")  # a data set, and its domain
SIDE = 64  # pixels, of images of noise
NATIVE = 1000  # queries of the target at most, among foreign ones or before an attack
MOST_FOREIGN = 200  # queries at most, and no more than one for every five of the target
PROBES = 300  # queries at most that are answered before and after an attack
BATCH = 32
WHOLE = Extent(whole=True)

Foreign = Literal["noise", "digits", "unknown class"]
ATTACKS: Mapping[str, int] = {"repeated": 1000, "repeated often": 5000, "between": 10, "opposite": 10}  # inputs of each


@dataclass(frozen=True)
class Intrude(Task):
    """One method on a shuffled target among whose queries are foreign ones, and on the same without them.

    Args:
        subject: the source model, with one target.
        method: by name.
        foreign: ``noise``: images of random pixels; ``digits``: handwritten ones; ``unknown class``: the target's
            images of a class that the bank has no rows of, which is that in place ``seed``, counted round.
        settings: of the method.
        extent: of the data.
        seed: of the order of arrival and of what is drawn.
    """

    subject: Frozen
    method: str
    foreign: Foreign
    settings: Mapping[str, Any] = field(default_factory=dict)
    extent: Extent = WHOLE
    seed: int = 0

    kind: ClassVar[str] = "intrude"

    def document(self) -> dict[str, Any]:
        """Every field."""
        return {
            "subject": self.subject.document(),
            "method": self.method,
            "foreign": self.foreign,
            "settings": dict(self.settings),
            "extent": self.extent.document(),
            "seed": self.seed,
        }

    def data(self) -> tuple[str, ...]:
        """Those of the subject, and the digits."""
        reads = self.subject.reads()
        if self.foreign == "digits":
            return (*reads, DIGITS[0])
        return reads

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """What the foreign queries did; see ``intrude``."""
        scene = scene_of(self.subject, workspace, self.extent)
        queries, labels = _shuffled_target(scene, self.seed)
        source = scene.source
        if self.foreign == "unknown class":
            unknown = self.seed % source.model.classes
            source = without_class(source, unknown)
            native = (labels != unknown).nonzero()[:NATIVE, 0]
            intruders = queries[labels == unknown][: _at_most_one_in_five(len(native))]
        else:
            native = torch.arange(min(NATIVE, len(queries)))
            intruders = _encoded(scene, self._images(workspace, _at_most_one_in_five(len(native))))
        adapter = find(self.method)(source, **self.settings)
        return intrude(adapter, queries[native], labels[native], intruders, self.seed)

    def _images(self, workspace: Workspace, count: int) -> Domain:
        """So many foreign images."""
        if self.foreign == "noise":
            return noise(count, self.seed)
        name, domain = DIGITS
        chosen = some(workspace.data(name, 0)[domain], count, self.seed)
        gray = chosen.take(range(len(chosen)))
        return Domain("digits", gray.expand(-1, 3, -1, -1).contiguous(), chosen.labels)

    def effort(self, costs: CostModel) -> float:
        """Each query twice."""
        reading = self.subject.reading()
        native = min(NATIVE, costs.target_images(reading, self.extent))
        return STARTING + MOST_FOREIGN * costs.forward(reading.encoder) + (2 * native + MOST_FOREIGN) * FEATURES


@dataclass(frozen=True)
class Attack(Task):
    """One method on a shuffled target, before and after inputs that someone made to do harm.

    Args:
        subject: the source model, with one target.
        method: by name.
        attack: one of ``ATTACKS``, see ``harmful``.
        settings: of the method.
        extent: of the data.
        seed: of the order of arrival and of what is drawn.
    """

    subject: Frozen
    method: str
    attack: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    extent: Extent = WHOLE
    seed: int = 0

    kind: ClassVar[str] = "attack"

    def document(self) -> dict[str, Any]:
        """Every field."""
        return {
            "subject": self.subject.document(),
            "method": self.method,
            "attack": self.attack,
            "settings": dict(self.settings),
            "extent": self.extent.document(),
            "seed": self.seed,
        }

    def data(self) -> tuple[str, ...]:
        """Those of the subject."""
        return self.subject.reads()

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """What the attack did; see ``attacked``."""
        scene = scene_of(self.subject, workspace, self.extent)
        queries, labels = _shuffled_target(scene, self.seed)
        most = NATIVE + PROBES
        adapter = find(self.method)(scene.source, **self.settings)
        return attacked(adapter, scene, queries[:most], labels[:most], self.attack, self.seed)

    def effort(self, costs: CostModel) -> float:
        """Queries before, the attack, and probes twice."""
        native = min(NATIVE, costs.target_images(self.subject.reading(), self.extent))
        return STARTING + (native + ATTACKS[self.attack] + 2 * PROBES) * FEATURES


def _shuffled_target(scene: Scene, seed: int) -> tuple[Tensor, Tensor]:
    """Features (n, D) and labels (n,) of the first target in random order."""
    target = scene.seen(scene.targets[0], "features")
    rows = Iid(seed=seed).order([target])[:, 1]
    return target.take(rows), target.labels[rows]


def _at_most_one_in_five(native: int) -> int:
    """How many foreign queries come among so many of the target."""
    return max(1, min(MOST_FOREIGN, native // 5))


def without_class(source: Source, label: int) -> Source:
    """The source without its samples of one class."""
    kept = source.labels != label
    domains = source.domains
    if domains is not None:
        domains = domains[kept]
    return replace(source, features=source.features[kept], labels=source.labels[kept], domains=domains, images=None)


def _encoded(scene: Scene, images: Domain) -> Tensor:
    """The features (n, D) of images that are no part of a scene."""
    model = scene.source.model
    return features(model, images.with_transform(model.preprocessing), cache=scene.cache)


def noise(count: int, seed: int) -> Domain:
    """Images of random pixels, every color as likely."""
    generator = torch.Generator().manual_seed(seed_of(seed, "noise"))
    images = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return Domain("noise", images, torch.zeros(count, dtype=torch.int64))


# Foreign queries -------------------------------------------------------------------------------------------------


def intrude(adapter: Adapter, native: Tensor, labels: Tensor, foreign: Tensor, seed: int) -> dict[str, Any]:
    """A stream with foreign queries and without: the record.

    ``without`` and ``beside`` are the accuracies, in percent, on native queries alone and beside foreign ones;
    ``changed`` is how many native answers differ between the two. ``voters`` counts the foreign queries that joined the
    bank, ``influential`` those that had a part in the vote on a later native query; None without a bank. ``novelty``
    compares the scores of novelty, if the method gives any: ``auroc`` is how well they tell foreign from native
    queries, ``foreign`` and ``native`` are how many of each are called foreign.

    Args:
        adapter: the method, which is reset before each stream.
        native: (n, D) queries of the target, in order.
        labels: (n,) of these.
        foreign: (m, D) queries, which arrive at random moments between the native ones.
        seed: of these moments.
    """
    alone = _answers(adapter, native)
    adapter.reset()
    generator = torch.Generator().manual_seed(seed_of(seed, "moments"))
    # A stable order of arrival: native queries keep theirs.
    moments = torch.cat(
        [torch.arange(len(native)).double(), torch.rand(len(foreign), generator=generator) * len(native)]
    )
    order = moments.argsort(stable=True)
    is_foreign = order >= len(native)
    arriving = torch.cat([native, foreign])[order]
    watch = Watch()
    answers = _answers(adapter, arriving, is_foreign, watch)[~is_foreign]
    voters: int | None = None
    influential: int | None = None
    if adapter.latest is not None:
        voters = len(watch.voters)
        influential = len(watch.influential)
    return {
        "without": _percent(alone == labels),
        "beside": _percent(answers == labels),
        "changed": _percent(answers != alone),
        "foreign": len(foreign),
        "voters": voters,
        "influential": influential,
        "novelty": watch.told_apart(is_foreign),
    }


@dataclass
class Watch:
    """What foreign queries do to a bank, batch by batch."""

    voters: set[int] = field(default_factory=set)  # ids of foreign rows
    influential: set[int] = field(default_factory=set)  # those of them that voted on a native query
    novelty: list[Tensor] = field(default_factory=list)  # (B,) scores

    def see(self, answer: Prediction, is_foreign: Tensor) -> None:
        """Takes note of the answer to a batch, of which some queries (B,) are foreign."""
        self.voters.update(answer.joined[is_foreign & (answer.joined >= 0)].tolist())
        neighbors = answer.neighbors.ids[~is_foreign]
        has_part = answer.weights[~is_foreign] != 0
        self.influential.update(self.voters.intersection(neighbors[has_part].tolist()))
        if answer.novelty is not None:
            self.novelty.append(answer.novelty.cpu())

    def told_apart(self, is_foreign: Tensor) -> dict[str, float] | None:
        """How well novelty tells foreign queries (n,) from others; None without scores, or without such queries."""
        if not self.novelty or not is_foreign.any():
            return None
        values = torch.cat(self.novelty).double()
        foreign = values[is_foreign]
        native = values[~is_foreign]
        return {
            "auroc": auroc(foreign, native),
            "foreign": _percent(foreign > FOREIGN),
            "native": _percent(native > FOREIGN),
        }


def _answers(adapter: Adapter, queries: Tensor, is_foreign: Tensor | None = None, watch: Watch | None = None) -> Tensor:
    """The labels (n,) that are given to queries (n, D) in order, from which the method learns."""
    answers = []
    for start in range(0, len(queries), BATCH):
        part = slice(start, start + BATCH)
        answers.append(adapter.step(queries[part]).argmax(1).cpu())
        if watch is not None and is_foreign is not None and adapter.latest is not None:
            watch.see(adapter.latest, is_foreign[part])
    return torch.cat(answers)


def _percent(marks: Tensor) -> float:
    return 100 * marks.double().mean().item()


# Attacks ---------------------------------------------------------------------------------------------------------


def attacked(adapter: Adapter, scene: Scene, queries: Tensor, labels: Tensor, attack: str, seed: int) -> dict[str, Any]:
    """The accuracy on the next queries of a stream, in percent, ``before`` an attack and ``after`` it.

    The method meets most of the queries first. The others are its probes: answered in succession, each time from the
    same state but for the attack. ``changed`` is how many of their answers differ.

    Args:
        adapter: the method.
        scene: where the attacker takes inputs from.
        queries: (n, D) of the target, in order.
        labels: (n,) of these.
        attack: one of ``ATTACKS``.
        seed: of what the attacker draws.
    """
    probes = min(PROBES, max(1, len(queries) // 4))
    met = queries[:-probes]
    answers = _answers(adapter, met)
    before = adapter.predict(queries[-probes:]).argmax(1).cpu()
    wrong = (answers != labels[:-probes]).nonzero()[:, 0].tolist()
    inputs = harmful(attack, met, answers, wrong, scene, seed)
    _answers(adapter, inputs)
    after = adapter.predict(queries[-probes:]).argmax(1).cpu()
    return {
        "before": _percent(before == labels[-probes:]),
        "after": _percent(after == labels[-probes:]),
        "changed": _percent(before != after),
    }


def harmful(attack: str, met: Tensor, answers: Tensor, wrong: Sequence[int], scene: Scene, seed: int) -> Tensor:
    """The inputs of an attack (n, D).

    ``repeated`` and ``repeated often`` send one image that was answered wrongly again and again: the first such. The
    others are made by someone who can choose features: ``between`` lies halfway between the mean direction of the
    queries that were answered as one class, and that of the source's images of another; ``opposite`` is the negative of
    the mean direction of all queries, with a little noise.

    Args:
        attack: one of ``ATTACKS``.
        met: (n, D) queries that the attacker saw.
        answers: (n,) labels that were given to them.
        wrong: places of those that were answered wrongly; if there are none, the first query is sent.
        scene: whose source the attacker knows.
        seed: of what the attacker draws.
    """
    count = ATTACKS[attack]
    if attack.startswith("repeated"):
        place = wrong[0] if wrong else 0
        return met[place : place + 1].expand(count, -1).contiguous()
    generator = torch.Generator().manual_seed(seed_of(seed, attack))
    directions = normalize(met, dim=1)
    if attack == "opposite":
        noisy = torch.randn(count, met.shape[1], generator=generator) / met.shape[1] ** 0.5
        opposite: Tensor = 0.1 * noisy - directions.mean(0)
        return opposite
    source = normalize(scene.source.features, dim=1)
    known = scene.source.labels.unique()
    crafted = []
    for _ in range(count):
        own = answers[int(torch.randint(len(answers), (1,), generator=generator))]
        others = known[known != own]
        other = others[int(torch.randint(len(others), (1,), generator=generator))]
        here = normalize(directions[answers == own].mean(0), dim=0)
        there = normalize(source[scene.source.labels == other].mean(0), dim=0)
        crafted.append((here + there) / 2)
    return torch.stack(crafted)
