"""Streams that can do harm, by accident or on purpose: foreign queries among native ones, and attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc.core import AdaNPC, Prediction
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

DIGITS = ("rotated-mnist", "0")  # a data set and the domain of it that is used
SIDE = 64  # pixels along each side of a noise image
NATIVE = 1000  # the most target queries that arrive among foreign ones or before an attack
MOST_FOREIGN = 200  # the most foreign queries; there is also at most one for every five of the target
PROBES = 300  # the most queries that are answered before and again after an attack
BATCH = 32
WHOLE = Extent(whole=True)

Foreign = Literal["noise", "digits", "unknown class"]
# Each attack with the number of inputs it sends.
ATTACKS: Mapping[str, int] = {"repeated": 1000, "repeated often": 5000, "between": 10, "opposite": 10}


@dataclass(frozen=True)
class Intrude(Task):
    """Run one method on a shuffled target twice: once with foreign queries mixed in, and once without.

    Args:
        subject: the source model, with one target.
        method: the name of the method.
        foreign: ``noise``: images of random pixels; ``digits``: handwritten digits; ``unknown class``: the target's
            images of one class, whose rows are left out of the bank. That class is number ``seed``, modulo the number
            of classes.
        settings: hyper-parameters of the method.
        extent: how much of the data is used.
        seed: seeds the order of arrival and everything that is drawn.
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
        """The data sets of the subject, and the digits if they are the foreign queries."""
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
        """This many foreign images, in color."""
        if self.foreign == "noise":
            return noise(count, self.seed)
        name, domain = DIGITS
        chosen = some(workspace.data(name, 0)[domain], count, self.seed)
        gray = chosen.take(range(len(chosen)))
        return Domain("digits", gray.expand(-1, 3, -1, -1).contiguous(), chosen.labels)

    def effort(self, costs: CostModel) -> float:
        """Encodes the foreign images, and answers the native queries twice."""
        reading = self.subject.reading()
        native = min(NATIVE, costs.target_images(reading, self.extent))
        encoding = MOST_FOREIGN * costs.forward(reading.encoder)
        answering = (2 * native + MOST_FOREIGN) * FEATURES
        return STARTING + encoding + answering


@dataclass(frozen=True)
class Attack(Task):
    """Run one method on a shuffled target, and measure it before and after inputs that were made to do harm.

    Args:
        subject: the source model, with one target.
        method: the name of the method.
        attack: one of ``ATTACKS``, see ``harmful``.
        settings: hyper-parameters of the method.
        extent: how much of the data is used.
        seed: seeds the order of arrival and everything that is drawn.
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
        """The data sets of the subject."""
        return self.subject.reads()

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """What the attack did; see ``attacked``."""
        scene = scene_of(self.subject, workspace, self.extent)
        queries, labels = _shuffled_target(scene, self.seed)
        most = NATIVE + PROBES
        adapter = find(self.method)(scene.source, **self.settings)
        return attacked(adapter, scene, queries[:most], labels[:most], self.attack, self.seed)

    def effort(self, costs: CostModel) -> float:
        """Answers the queries before the attack, the attack itself, and the probes twice."""
        native = min(NATIVE, costs.target_images(self.subject.reading(), self.extent))
        return STARTING + (native + ATTACKS[self.attack] + 2 * PROBES) * FEATURES


def _shuffled_target(scene: Scene, seed: int) -> tuple[Tensor, Tensor]:
    """The features (n, D) and labels (n,) of the first target, in random order."""
    target = scene.seen(scene.targets[0], "features")
    rows = Iid(seed=seed).order([target])[:, 1]
    return target.take(rows), target.labels[rows]


def _at_most_one_in_five(native: int) -> int:
    """How many foreign queries are mixed into this many of the target: one in five, within 1 and ``MOST_FOREIGN``."""
    return max(1, min(MOST_FOREIGN, native // 5))


def without_class(source: Source, label: int) -> Source:
    """The source without its samples of one class."""
    kept = source.labels != label
    domains = source.domains
    if domains is not None:
        domains = domains[kept]
    features = source.features[kept]
    return replace(
        source, features=features, labels=source.labels[kept], domains=domains, images=None, images_digest=""
    )


def _encoded(scene: Scene, images: Domain) -> Tensor:
    """The features (n, D) of images that do not belong to the scene."""
    model = scene.source.model
    return features(model, images.with_transform(model.preprocessing), cache=scene.cache)


def noise(count: int, seed: int) -> Domain:
    """Images of random pixels, with every color equally likely."""
    generator = torch.Generator().manual_seed(seed_of(seed, "noise"))
    images = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return Domain("noise", images, torch.zeros(count, dtype=torch.int64))


# Foreign queries -------------------------------------------------------------------------------------------------


def intrude(adapter: Adapter, native: Tensor, labels: Tensor, foreign: Tensor, seed: int) -> dict[str, Any]:
    """The record of a stream that is answered without foreign queries, and again with them.

    * ``without`` and ``beside``: the accuracy on native queries, in percent, without and beside foreign ones.
    * ``changed``: the percentage of native answers that differ between the two.
    * ``voters``: how many foreign queries joined the bank. None without a bank.
    * ``influential``: how many of those took part in the vote on a later native query. None without a bank.
    * ``decisive``: how many of those decided such a vote, so that without that row alone the answer would have been
      another. None if the method does not answer by a classifier of the library.
    * ``novelty``: how well the novelty scores of the method separate foreign from native queries (``auroc``), and the
      percentage of each that is called foreign (``foreign``, ``native``). None if the method has no such scores.

    Args:
        adapter: the method; it is reset before the second stream.
        native: (n, D) queries of the target, in order.
        labels: (n,) their labels.
        foreign: (m, D) queries that arrive at random moments between the native ones.
        seed: seeds these moments.
    """
    alone = _answers(adapter, native)
    adapter.reset()
    generator = torch.Generator().manual_seed(seed_of(seed, "moments"))
    # Native query i arrives at moment i, so that native queries stay in order; foreign ones arrive anywhere between.
    native_moments = torch.arange(len(native)).double()
    foreign_moments = torch.rand(len(foreign), generator=generator) * len(native)
    order = torch.cat([native_moments, foreign_moments]).argsort(stable=True)
    is_foreign = order >= len(native)
    arriving = torch.cat([native, foreign])[order]
    watch = Watch()
    answers = _answers(adapter, arriving, is_foreign, watch)[~is_foreign]
    voters: int | None = None
    influential: int | None = None
    decisive: int | None = None
    if adapter.latest is not None:
        voters = len(watch.voters)
        influential = len(watch.influential)
    if _classifier_of(adapter) is not None:
        decisive = len(watch.decisive)
    return {
        "without": _percent(alone == labels),
        "beside": _percent(answers == labels),
        "changed": _percent(answers != alone),
        "foreign": len(foreign),
        "voters": voters,
        "influential": influential,
        "decisive": decisive,
        "novelty": watch.separation(is_foreign),
    }


@dataclass
class Watch:
    """Collects, batch by batch, what foreign queries do to a bank."""

    voters: set[int] = field(default_factory=set)  # ids of foreign rows in the bank
    influential: set[int] = field(default_factory=set)  # those of them that have voted on a native query
    decisive: set[int] = field(default_factory=set)  # those without which an answer to one would have been another
    novelty: list[Tensor] = field(default_factory=list)  # (B,) scores of each batch

    def foresee(self, classifier: AdaNPC, native: Tensor) -> None:
        """Takes each foreign row away that votes on native queries (n, D), which have not been learned from yet."""
        answer = classifier.predict(native)
        ids = answer.neighbors.ids
        foreign = torch.tensor(sorted(self.voters), dtype=torch.int64, device=ids.device)
        queries, places = (torch.isin(ids, foreign) & (answer.weights != 0)).nonzero(as_tuple=True)
        rows = ids[queries, places]
        without = classifier.predict(native[queries], exclude=rows[:, None])
        decided = without.labels != answer.labels[queries]
        self.decisive.update(rows[decided].tolist())

    def see(self, answer: Prediction, is_foreign: Tensor) -> None:
        """Records the effects of one batch, given its answer and which of its queries (B,) are foreign."""
        self.voters.update(answer.joined[is_foreign & (answer.joined >= 0)].tolist())
        neighbors = answer.neighbors.ids[~is_foreign]
        has_part = answer.weights[~is_foreign] != 0
        self.influential.update(self.voters.intersection(neighbors[has_part].tolist()))
        if answer.novelty is not None:
            self.novelty.append(answer.novelty.cpu())

    def separation(self, is_foreign: Tensor) -> dict[str, float] | None:
        """How well novelty separates foreign queries (n,) from native ones; None without scores or foreign queries."""
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


def _classifier_of(adapter: Adapter) -> AdaNPC | None:
    """The classifier of the library by which a method answers, if it does."""
    classifier = getattr(adapter, "classifier", None)
    if isinstance(classifier, AdaNPC):
        return classifier
    return None


def _answers(adapter: Adapter, queries: Tensor, is_foreign: Tensor | None = None, watch: Watch | None = None) -> Tensor:
    """The labels (n,) that a method gives to queries (n, D) as they arrive; it learns from them as it goes."""
    answers = []
    classifier = _classifier_of(adapter)
    for start in range(0, len(queries), BATCH):
        part = slice(start, start + BATCH)
        if watch is not None and is_foreign is not None and classifier is not None:
            watch.foresee(classifier, queries[part][~is_foreign[part]])
        answers.append(adapter.step(queries[part]).argmax(1).cpu())
        if watch is not None and is_foreign is not None and adapter.latest is not None:
            watch.see(adapter.latest, is_foreign[part])
    return torch.cat(answers)


def _percent(marks: Tensor) -> float:
    return 100 * marks.double().mean().item()


# Attacks ---------------------------------------------------------------------------------------------------------


def attacked(adapter: Adapter, scene: Scene, queries: Tensor, labels: Tensor, attack: str, seed: int) -> dict[str, Any]:
    """The accuracy on the last queries of a stream, in percent, ``before`` an attack and ``after`` it.

    The method first answers and learns from most of the queries. The remaining ones are probes: they are answered
    before and after the attack without being learned from, so that the attack alone makes the difference.
    ``changed`` is the percentage of probes whose answer differs.

    Args:
        adapter: the method.
        scene: its source is known to the attacker.
        queries: (n, D) queries of the target, in order.
        labels: (n,) their labels.
        attack: one of ``ATTACKS``.
        seed: seeds what the attacker draws.
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
    """The inputs (n, D) that an attacker sends.

    * ``repeated`` and ``repeated often`` send the first image that was answered wrongly, again and again.
    * ``between`` lies halfway between the mean direction of the queries that were answered as one class, and the mean
      direction of the source's images of another. It takes an attacker who can choose features, as does the next.
    * ``opposite`` is the negative of the mean direction of all queries, with a little noise.

    Args:
        attack: one of ``ATTACKS``.
        met: (n, D) queries that the attacker saw.
        answers: (n,) labels that were given to them.
        wrong: positions of those that were answered wrongly; if there are none, the first query is sent.
        scene: its source is known to the attacker.
        seed: seeds what the attacker draws.
    """
    count = ATTACKS[attack]
    if attack.startswith("repeated"):
        place = 0
        if wrong:
            place = wrong[0]
        return met[place].expand(count, -1).contiguous()
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
