"""The preset "safe" against loops over plain lists, and what it promises."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from numpy.typing import NDArray
from presets import safe
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor

import adanpc
from adanpc.core import AdaNPC, Append, Feedback, MemoryBank, Origin, Restore, Veto
from adanpc.core.codec import _packed, _unpacked, canonical, decode, encode
from adanpc.core.guard import ADVANTAGE, ERROR, LEAD, Stream, packed_length, with_more_classes
from adanpc.core.safe import as_given, factors_of
from adanpc.core.table import TableError
from adanpc.core.transform import Parts, Transform, amplification, domain_centers, fit, strongest
from adanpc.core.tryout import _left_out, _root_suits_domains, _root_suits_rows, suitable_parts
from adanpc.errors import AdaNPCError, ChangeError, EmptyBankError, LabelError
from adanpc.index.products import ExactProducts
from adanpc.store import BankFileError
from adanpc.store.file import KEY, _document, _seal

Array = NDArray[Any]
DIM = 12
SAFE = {
    "stream": "mixed", "transform": True, "screen": True, "guard": True, "balance": 0.5, "carry": True, "home": True
}  # fmt: skip
CLASSES = 3


def samples(count: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Features around a center for each class, moved by a shift that all of them share, and their classes."""
    centers = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    direction = torch.randn(DIM, generator=torch.Generator().manual_seed(98))
    return centers[labels] + 0.7 * torch.randn(count, DIM, generator=generator) + shift * direction, labels


def made(bank: dict[str, Any] | None = None, domains: int = 2, **options: Any) -> AdaNPC:
    classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True, **(bank or {})), preset="safe", **options)
    features, labels = samples(60, 0)
    classifier.learn(features, labels, domain=torch.arange(60) % domains)
    return classifier


def made_of(features: Tensor, labels: Tensor, domains: Tensor) -> AdaNPC:
    """The preset, which has learned these rows."""
    classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe")
    classifier.learn(features, labels, domain=domains)
    return classifier


def fitted(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> Transform:
    """The transform of the parts that suit the source."""
    return fit(features, labels, domains, classes, suitable_parts(features, labels, domains, classes))


def unit(vector: Array) -> Array:
    return np.asarray(vector / np.linalg.norm(vector))


class Loop:
    """The preset as its page describes it, one query at a time, in NumPy, with the transform that was fitted."""

    def __init__(self, classifier: AdaNPC) -> None:
        transform = classifier.bank.contents.statistics.transform
        assert transform is not None
        self.transform = transform
        table = classifier.bank.table("id", "label")
        self.rows = classifier.bank.rows(table["id"]).numpy().astype(float)
        self.labels = table["label"].tolist()
        settings = safe(classifier)
        self.mixed = settings.stream == "mixed"
        self.balance = settings.balance
        self.guard = settings.guard
        self.screen = settings.screen
        self.carry = settings.carry
        self.home = settings.home
        self.power = float(transform.power)
        self.mean = transform.origin.numpy()
        self.count = 0
        self.last: int | None = None
        self.shares = np.full(CLASSES, 1 / CLASSES)
        self.repeats = 1 / CLASSES
        self.masses = np.zeros(CLASSES)
        self.lately = np.full(CLASSES, 1 / CLASSES)
        self.coherence = 0.0
        self.believed = np.full(CLASSES, 1 / CLASSES)
        self.believed_repeats = 1 / CLASSES
        self.last_believed: int | None = None
        self.held = 0.0
        self.gain = 0.02
        self.novelty = 0.0
        self.one_domain = len(classifier.bank.table("domain")["domain"].unique()) == 1
        self.agreements: list[tuple[float, float]] = []
        self.doubted = 0.0
        self.stream: list[tuple[Array, Array]] = []

    def step(self, feature: Array) -> tuple[Array, float, bool]:
        """The answer, how far it is trusted, and whether the query joins."""
        z = self.transformed(feature)
        origin = self.transform.origin.numpy()
        frozen, similarity = self.vote(unit(z - origin))
        frozen_mixed = seems_mixed(self.count, self.shares, self.repeats)
        mixed = 1.0 if self.mixed else max(self.held, frozen_mixed)
        slow = max(1 / (self.count + 17), 1 / 1000)
        mean = (1 - slow) * self.mean + slow * z
        shift = mean - origin
        span = self.transform.span.numpy()
        inside = (span @ shift) @ span
        moved = z - origin - (shift - inside) - mixed * inside
        nearer = float((moved**2).sum() / ((z - origin) ** 2).sum())
        moved = unit(moved)
        evidence, from_source = self.vote(moved)
        novelty = float((self.transform.foreign.numpy() > max(similarity, from_source)).mean())
        rate = max(1 / (self.count + 17), 1 / 100)
        before = (self.lately, self.coherence)
        self.trust_before = self.trusted(self.count)
        belief, share = self.with_stream(moved, evidence, from_source, mixed, rate)
        belief = belief / (self.masses + 8) ** (self.balance * mixed)
        belief = belief / belief.sum()
        trust = self.trusted(self.count + 1)
        if self.mixed or not self.guard:
            trust = 1.0
        nearest = sorted((float(row @ moved) for row, _ in self.stream), reverse=True)
        if self.home:
            closest = max([from_source, float(np.mean(nearest[:10]))] if nearest else [from_source])
            trust /= 1 + (nearer * (1 - closest) / (1 - similarity)) ** 16
        copied = len(nearest) >= 3 and 1 - nearest[2] <= 0.2 * (1 - from_source)
        far_away = self.count >= 32 and self.novelty > 0.5
        joins = not self.screen or ((novelty <= 0.9 or far_away) and not copied)
        mixture = trust * belief + (1 - trust) * frozen
        compared = self.compared(moved, frozen, evidence, belief, mixture, from_source)
        if joins:
            self.count += 1
            self.novelty += rate * (novelty - self.novelty)
            label = int(frozen.argmax())
            self.shares = (1 - rate) * self.shares + rate * np.eye(CLASSES)[label]
            if self.last is not None:
                self.repeats = (1 - rate) * self.repeats + rate * (label == self.last)
            self.last = label
            self.mean = mean
            self.masses = self.masses + belief
            if compared is not None:
                of_frozen, of_belief, of_answer = compared
                gain = of_belief - of_frozen
                self.gain += max(1 / (self.count - 32 + 16), 1 / 200) * (gain - self.gain)
                doubt = mixed if self.one_domain and frozen.argmax() != evidence.argmax() else 0.0
                self.doubted += doubt
                self.agreements.append(((1 - doubt) * of_frozen, (1 - doubt / 2) * of_answer))
            self.believe(int(belief.argmax()), rate, frozen_mixed)
            carried = belief ** (1 + (share * belief.max()) ** 1.5) if self.carry else belief
            self.stream.append((moved, carried / carried.sum()))
        else:
            self.lately, self.coherence = before
        return mixture**2.5 / (mixture**2.5).sum(), trust, joins

    def trusted(self, count: int) -> float:
        chance = float((self.lately**2).sum())
        beyond = (self.coherence - chance) / (1 - chance)
        trust = np.clip((beyond - 0.35) / 0.1, 0, 1) * np.clip(self.gain / 0.02, 0, 1)
        return float(trust) if count > 32 else 0.0

    def compared(
        self, moved: Array, frozen: Array, evidence: Array, belief: Array, mixture: Array, from_source: float
    ) -> tuple[float, float, float] | None:
        """How far the nearest rows of the stream agree with the frozen answer, the belief, and the answer given."""
        if self.count < 32:
            return None
        near = sorted(((float(row @ moved), believed) for row, believed in self.stream), key=lambda pair: -pair[0])[:10]
        if 1 - np.mean([similarity for similarity, _ in near]) > 3 * (1 - from_source):
            return None
        total = sum(math.exp(similarity / 0.1) for similarity, _ in near)

        def agreement(answer: int) -> float:
            share = sum(math.exp(s / 0.1) / total for s, believed in near if believed.argmax() == answer)
            return share if answer == evidence.argmax() else share / 2

        return agreement(int(frozen.argmax())), agreement(int(belief.argmax())), agreement(int(mixture.argmax()))

    def transformed(self, feature: Array) -> Array:
        z = unit(np.sign(feature) * np.abs(feature) ** self.power)
        z = z - (self.transform.directions.numpy() @ z) @ self.transform.damped.numpy()
        return np.asarray(z + (self.transform.telling.numpy() @ z) @ self.transform.amplified.numpy())

    def believe(self, label: int, rate: float, frozen_mixed: float) -> None:
        """Every 64th query, it is looked at whether beliefs confirm that classes are mixed."""
        self.believed = (1 - rate) * self.believed + rate * np.eye(CLASSES)[label]
        if self.last_believed is not None:
            self.believed_repeats = (1 - rate) * self.believed_repeats + rate * (label == self.last_believed)
        self.last_believed = label
        if self.count % 64 == 0 and self.carry:
            believed_mixed = seems_mixed(self.count, self.believed, self.believed_repeats)
            self.held = min(believed_mixed, max(self.held, frozen_mixed))

    def vote(self, query: Array) -> tuple[Array, float]:
        similarity = self.rows @ query
        nearest = np.argsort(-similarity)[:100]
        near = [(float(similarity[row]), self.labels[row]) for row in nearest]
        probs = oracles.vote(near, CLASSES, "classwise", 0.06, self.transform.per_class)
        return np.array(probs), float(similarity[nearest[:10]].mean())

    def with_stream(
        self, moved: Array, evidence: Array, from_source: float, mixed: float, rate: float
    ) -> tuple[Array, float]:
        """The belief, and the share of rows of the stream in it."""
        answered = int(evidence.argmax())
        self.lately = (1 - rate) * self.lately + rate * np.eye(CLASSES)[answered]
        if not self.stream:
            return evidence, 0.0
        similarity = [float(row @ moved) for row, _ in self.stream]
        nearest = np.argsort(similarity)[::-1][:10]
        powers = np.array([math.exp(similarity[row] / 0.1) for row in nearest])
        votes = powers / powers.sum()
        beliefs = np.array([self.stream[row][1] for row in nearest])
        agreement = sum(vote for vote, belief in zip(votes, beliefs, strict=True) if belief.argmax() == answered)
        from_stream = float(np.mean([similarity[row] for row in nearest]))
        share = min(0.5 + 0.5 * mixed, 1 / (1 + ((1 - from_stream) / (1 - from_source)) ** 8)) * len(nearest) / 10
        weight = rate * (1 - share * self.trust_before) if self.carry else rate
        self.coherence = (1 - weight) * self.coherence + weight * agreement
        return np.asarray((1 - share) * evidence + share * votes @ beliefs), share


def seems_mixed(count: int, shares: Array, repeats: float) -> float:
    if count < 32:
        return 0.0
    repetition = np.clip((repeats - float((shares**2).sum()) - 0.16) / -0.08, 0, 1)
    largest = np.clip((shares.max() - 0.8) / -0.2, 0, 1)
    return float(repetition * largest)


def disturbed(count: int, seed: int) -> Tensor:
    """Shifted features with noise and many copies of some of them in between."""
    features, _ = samples(count, seed, shift=0.5)
    generator = torch.Generator().manual_seed(seed + 1)
    features[3::11] = torch.randn(len(features[3::11]), DIM, generator=generator)
    near = 1e-3 * torch.randn(len(features[2::4]), DIM, generator=generator)
    features[2::4] = features[2] + near
    return features


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream": "mixed"},
        {"guard": False},
        {"balance": 1.0},
        {"screen": False},
        {"transform": False},
        {"carry": False},
        {"home": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("domains", [1, 2])
def test_answers_are_those_of_the_loop(options: dict[str, Any], domains: int) -> None:
    classifier = made(domains=domains, **options)
    loop = Loop(classifier)
    features = disturbed(120, 1)
    answer = classifier.step(features)
    assert answer.trust is not None
    for query, feature in enumerate(features.double().numpy()):
        probs, trust, joins = loop.step(feature)
        assert answer.probs[query].tolist() == pytest.approx(probs.tolist(), abs=1e-4)
        assert float(answer.trust[query]) == pytest.approx(trust, abs=1e-3)
        assert (int(answer.joined[query]) >= 0) == joins
    assert loop.count < 120 or not loop.screen  # some were kept out
    if domains > 1:
        assert loop.doubted == 0
    elif loop.mixed:
        assert loop.doubted > 0
    known = classifier.bank.contents.stream().agreements
    of_frozen, of_given = np.mean(loop.agreements, axis=0)
    assert (known.frozen, known.adapted) == pytest.approx((of_frozen, of_given), abs=1e-3)


def test_a_class_without_any_probability_is_given_none() -> None:
    probs = np.array([0.5, 0.0, 0.5 - 1e-200, 1e-200])
    given = as_given(probs)
    factors = factors_of(given, probs)
    assert given.tolist() == pytest.approx([0.5, 0, 0.5, 0])
    assert factors.tolist() == pytest.approx([1, 0, 1, 0])


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "bank",
    [{}, {"capacity": 9}, {"capacity": 9, "evict": "reservoir", "seed": 5}, {"capacity": 9, "evict": "balanced"}],
    ids=str,
)
def test_batch_size_never_changes_an_answer(bank: dict[str, Any]) -> None:
    features = disturbed(290, 2)  # more than are resolved together
    whole = made(bank)
    expected = whole.step(features)
    for size in (1, 7, 40):
        classifier = made(bank)
        answers = [classifier.step(part) for part in features.split(size)]
        assert torch.equal(torch.cat([answer.probs for answer in answers]), expected.probs)
        assert torch.equal(torch.cat([answer.joined for answer in answers]), expected.joined)
        assert classifier.digest() == whole.digest()


@pytest.mark.no_cover
def test_batch_size_never_changes_an_answer_where_classes_do_not_arrive_mixed() -> None:
    """Then each block of queries waits for what the beliefs of the one before it look like."""
    features, labels = samples(290, 2, shift=1.0)
    features = torch.cat([features[labels == 1], features])
    whole = made()
    expected = whole.step(features)
    for size in (1, 50):
        classifier = made()
        answers = [classifier.step(part) for part in features.split(size)]
        assert torch.equal(torch.cat([answer.probs for answer in answers]), expected.probs)
        assert classifier.digest() == whole.digest()


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_batch_size_never_changes_an_answer_where_products_are_kept(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide features and many rows, for which a batch multiplies its queries with all rows once for both frames."""
    used = []
    search = ExactProducts.search

    def counted(*arguments: Any, **options: Any) -> Any:
        used.append(True)
        return search(*arguments, **options)

    monkeypatch.setattr(ExactProducts, "search", counted)
    features, labels = told_apart_by_one(160, 3.0)
    source = slice(0, 500)
    stream = features[500:550] + 0.3

    def answered(size: int) -> tuple[Tensor, Tensor, str]:
        classifier = AdaNPC(MemoryBank(160, 2, soft=True, storage=storage), preset="safe")
        classifier.learn(features[source], labels[source], domain=torch.arange(500) % 2)
        answers = [classifier.step(part) for part in stream.split(size)]
        probs = torch.cat([answer.probs for answer in answers])
        return probs, torch.cat([answer.joined for answer in answers]), classifier.digest()

    one_by_one = answered(1)
    assert not used
    for size in (20, 50):
        together = answered(size)
        assert used
        used.clear()
        assert torch.equal(together[0], one_by_one[0])
        assert torch.equal(together[1], one_by_one[1])
        assert together[2] == one_by_one[2]


def test_predict_answers_as_the_next_step_would_and_changes_nothing() -> None:
    classifier = made()
    features, _ = samples(60, 3, shift=0.5)
    classifier.step(features[:50])
    before = classifier.digest()
    asked = classifier.predict(features[50:])
    assert classifier.digest() == before
    answer = classifier.step(features[50:51])
    assert torch.equal(asked.probs[:1], answer.probs)
    assert len(classifier.predict(features[:0]).probs) == 0
    assert len(classifier.step(features[:0]).probs) == 0


def test_weights_name_the_rows_behind_an_answer() -> None:
    classifier = made()
    features, _ = samples(80, 4, shift=0.5)
    answer = classifier.step(features)
    shares = answer.weights.sum(1)
    assert (shares <= 1 + 1e-5).all()
    assert float(shares.mean()) > 0.9  # the rest is of classes without a row among the nearest
    for ids, weights in zip(answer.neighbors.ids, answer.weights, strict=True):
        known = ids[ids >= 0]
        assert len(known.unique()) == len(known)  # a row is shown once
        assert (weights[ids < 0] == 0).all()
    assert "source" in str(adanpc.explain(answer, classifier.bank, 70))


def test_a_stream_of_one_class_keeps_the_frozen_answers() -> None:
    features, labels = samples(600, 5, shift=0.8)
    one = features[labels == 1]
    classifier = made()
    answer = classifier.step(one)
    assert answer.frozen is not None
    frozen = float((answer.frozen.argmax(1) == 1).float().mean())
    assert float((answer.labels == 1).float().mean()) >= frozen - 0.005


def test_a_mixed_stream_gains() -> None:
    features, labels = samples(600, 6, shift=3.0)
    classifier = made()
    answer = classifier.step(features)
    assert answer.frozen is not None
    assert answer.trust is not None
    frozen = float((answer.frozen.argmax(1) == labels).float().mean())
    assert float((answer.labels == labels).float().mean()) > frozen
    assert float(answer.trust[-100:].mean()) > 0.5


def growing(count: int) -> tuple[Tensor, Tensor]:
    """Samples of classes that turn away, little by little, and in the end look most like another one each."""
    generator = torch.Generator().manual_seed(17)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    angle = torch.linspace(0, math.pi / 2, count)[:, None]
    axes = torch.eye(DIM)
    away = axes[labels + CLASSES] + 0.5 * axes[(labels + 1) % CLASSES]
    features = angle.cos() * axes[labels] + angle.sin() * away
    return features + 0.1 * torch.randn(count, DIM, generator=generator), labels


def turning(**options: Any) -> tuple[AdaNPC, Tensor, Tensor]:
    """A classifier that has learned what ``growing`` starts with, a stream of that, and its labels."""
    features, labels = growing(3000)
    classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe", **options)
    known = torch.arange(300) % CLASSES
    noise = torch.randn(300, DIM, generator=torch.Generator().manual_seed(18))
    classifier.learn(torch.eye(DIM)[known] + 0.1 * noise, known)
    return classifier, features, labels


def test_beliefs_are_carried_along_a_shift_that_grows() -> None:
    """In the end the frozen answer is wrong throughout."""
    classifier, features, labels = turning()
    answer = classifier.step(features)
    assert answer.frozen is not None
    assert float((answer.frozen[-500:].argmax(1) == labels[-500:]).float().mean()) < 0.1
    assert float((answer.labels[-500:] == labels[-500:]).float().mean()) > 0.9


def test_a_query_that_is_at_home_in_the_source_is_answered_as_before_the_stream() -> None:
    features, _ = samples(600, 6, shift=3.0)
    source, _ = samples(200, 21)
    classifier = made()
    before = classifier.predict(source)
    classifier.step(features)
    after = classifier.predict(source)
    assert after.trust is not None
    assert float(after.trust.mean()) < 0.1
    assert float((after.labels == before.labels).float().mean()) >= 0.99
    adapted = made(home=False)
    adapted.step(features)
    without = adapted.predict(source).trust
    assert without is not None
    assert float(without.min()) > 0.9


def test_vetoed_rows_have_no_part_in_answers() -> None:
    classifier = made()
    features, _ = samples(40, 7)
    classifier.step(features)
    answer = classifier.predict(features[:1])
    witness = int(answer.neighbors.ids[0, 0])
    classifier.apply(Veto((witness,)))
    assert witness not in classifier.predict(features[:1]).neighbors.ids
    classifier.apply(Restore((witness,)))
    assert torch.equal(classifier.predict(features[:1]).probs, answer.probs)
    excluded = classifier.predict(features[:1], exclude=torch.tensor([[witness]]))
    assert witness not in excluded.neighbors.ids


def test_an_expert_is_heard() -> None:
    classifier = made()
    features, _ = samples(40, 8, shift=0.5)
    classifier.step(features[:39])
    query = features[39:]
    before = classifier.predict(query)
    label = (int(before.labels[0]) + 1) % CLASSES
    classifier.learn(query.repeat(10, 1), torch.full((10,), label), origin=Origin.EXPERT, who="Ada")
    assert float(classifier.predict(query).probs[0, label]) > float(before.probs[0, label])


def test_source_rows_that_come_later_keep_the_transform() -> None:
    classifier = made()
    transform = classifier.bank.contents.statistics.transform
    features, labels = samples(30, 11)
    classifier.learn(features, labels)
    assert classifier.bank.contents.statistics.transform is transform
    assert (classifier.predict(features).labels == labels).float().mean() > 0.8


def far_from_its_source() -> tuple[AdaNPC, Tensor]:
    """A classifier, and a stream whose queries have the classes of the source and much else that the source lacks."""
    generator = torch.Generator().manual_seed(2)
    centers = torch.zeros(12, 40)
    centers[:, :5] = torch.randn(12, 5, generator=generator)
    labels = torch.arange(600) % 12
    features = centers[labels] + 0.1 * torch.randn(600, 40, generator=generator)
    classifier = AdaNPC(MemoryBank(40, 12, soft=True), preset="safe", transform=False)
    classifier.learn(features[:200], labels[:200])
    stream = features[200:].clone()
    stream[:, 5:] += 0.6 * torch.randn(400, 35, generator=generator)
    return classifier, stream


class TestScreening:
    def test_an_image_repeated_has_the_weight_of_a_few(self) -> None:
        features, _ = samples(150, 12, shift=0.5)
        probes, _ = samples(100, 13, shift=0.5)
        classifier = made()
        classifier.step(features)
        generator = torch.Generator().manual_seed(14)
        copies = features[7] + 1e-3 * torch.randn(1000, DIM, generator=generator)
        rows = len(classifier.bank)
        answer = classifier.step(copies)
        assert len(classifier.bank) - rows <= 3
        assert int((answer.joined >= 0).sum()) == len(classifier.bank) - rows
        clean = made()
        clean.step(features)
        assert (classifier.predict(probes).labels == clean.predict(probes).labels).float().mean() >= 0.99

    def test_every_copy_is_answered_all_the_same(self) -> None:
        classifier = made()
        feature = samples(1, 15)[0]
        answer = classifier.step(feature.expand(200, -1))
        assert int((answer.joined >= 0).sum()) == 3
        assert len(answer.labels.unique()) == 1

    def test_queries_unlike_the_source_do_not_join(self) -> None:
        """The source lies in a few of many dimensions, with more classes than these; foreign queries in all others."""
        generator = torch.Generator().manual_seed(2)
        centers = torch.zeros(12, 40)
        centers[:, :5] = torch.randn(12, 5, generator=generator)
        labels = torch.arange(300) % 12
        features = centers[labels] + 0.1 * torch.randn(300, 40, generator=generator)
        classifier = AdaNPC(MemoryBank(40, 12, soft=True), preset="safe")
        classifier.learn(features[:200], labels[:200])
        foreign = torch.zeros(100, 40)
        foreign[:, 5:] = torch.randn(100, 35, generator=generator)
        answer = classifier.step(torch.stack([features[200:], foreign], 1).flatten(0, 1))
        assert answer.novelty is not None
        assert float((answer.joined[1::2] >= 0).float().mean()) <= 0.02
        assert float((answer.joined[0::2] >= 0).float().mean()) >= 0.9
        assert float(answer.novelty[1::2].min()) > float(answer.novelty[0::2].max())
        assert classifier.signs().queries == int((answer.joined >= 0).sum())

    def test_a_stream_that_is_far_away_as_a_whole_is_learned_from(self) -> None:
        """Most of its queries would be foreign in another stream."""
        classifier, stream = far_from_its_source()
        answer = classifier.step(stream)
        assert answer.novelty is not None
        foreign = answer.novelty > 0.9
        assert 0.5 < float(foreign.float().mean()) < 0.9
        joined = answer.joined >= 0
        assert not joined[foreign][:30].any()
        assert joined[-200:].all()
        assert "no query is taken for foreign" in classifier.signs().words

    def test_a_stream_of_nothing_but_foreign_queries_leaves_no_trace(self) -> None:
        classifier, _ = far_from_its_source()
        before = classifier.digest()
        foreign = torch.zeros(200, 40)
        foreign[:, 5:] = torch.randn(200, 35, generator=torch.Generator().manual_seed(5))
        answer = classifier.step(foreign)
        assert int((answer.joined >= 0).sum()) == 0
        assert classifier.digest() == before

    def test_batch_size_never_changes_an_answer_to_a_stream_that_is_far_away(self) -> None:
        classifier, stream = far_from_its_source()
        whole = classifier.step(stream)
        one_by_one, _ = far_from_its_source()
        answers = [one_by_one.step(query[None]) for query in stream]
        assert torch.equal(torch.cat([answer.probs for answer in answers]), whole.probs)
        assert torch.equal(torch.cat([answer.joined for answer in answers]), whole.joined)
        assert one_by_one.digest() == classifier.digest()

    def test_nothing_joins_and_nothing_changes(self) -> None:
        classifier = made()
        feature = samples(1, 15)[0]
        classifier.step(feature.expand(3, -1))
        before = classifier.digest()
        answer, change = classifier.propose(feature.expand(2, -1), keys=torch.arange(2))
        assert change is None
        assert answer.joined.tolist() == [-1, -1]
        classifier.step(feature)
        assert classifier.digest() == before

    def test_keys_go_with_the_rows_that_join(self) -> None:
        classifier = made()
        features = samples(1, 15)[0].expand(5, -1).clone()
        features[4] = samples(1, 16)[0]
        answer = classifier.step(features, keys=torch.arange(10, 15))
        keys = classifier.bank.table("key")["key"][60:]
        assert answer.joined.tolist() == [60, 61, 62, -1, 63]
        assert keys.tolist() == [10, 11, 12, 14]

    def test_with_one_class_nothing_is_novel(self) -> None:
        classifier = AdaNPC(MemoryBank(DIM, 1, soft=True), preset="safe")
        classifier.learn(samples(20, 0)[0], torch.zeros(20, dtype=torch.int64))
        answer = classifier.step(samples(5, 1)[0])
        assert answer.novelty is not None
        assert answer.novelty.tolist() == [0] * 5


class TestLabels:
    def test_a_few_labels_choose_the_better_answers(self) -> None:
        """The shift looks like a change of class shares, which no sign can tell from one; labels can."""
        features, labels = samples(300, 6)
        centers = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
        shifted = features + 1.3 * (centers[1] - centers[0])
        classifier = made()
        before = classifier.step(shifted[:150])
        asked = 0
        for question in classifier.ask(shifted[:150], most=10):
            assert question.frozen != question.adapted
            classifier.apply(question.answered(int(labels[question.query]), who="Ada"))
            asked += 1
            if "are better" in str(classifier.signs()):
                break
        assert asked < 10
        after = classifier.step(shifted[150:])
        accuracy = float((after.labels == labels[150:]).float().mean())
        assert accuracy > float((before.labels == labels[:150]).float().mean()) + 0.1

    def test_the_adapted_answers_are_given_once_they_lead(self) -> None:
        classifier = made()
        queries = samples(30, 1, shift=0.5)[0]
        mixed = made(stream="mixed")
        for _ in range(3):
            classifier.apply(Feedback(2, frozen=0, adapted=2))
            classifier.apply(Feedback(2, frozen=0, adapted=1))  # says nothing
            classifier.apply(Feedback(1, frozen=1, adapted=1))  # nor does this
        before = classifier.predict(queries)
        assert before.trust is not None
        assert float(before.trust.max()) == 0
        classifier.apply(Feedback(2, frozen=0, adapted=2))
        assert torch.equal(classifier.predict(queries).probs, mixed.predict(queries).probs)
        assert "the adapted answers are better" in str(classifier.signs())

    def test_the_frozen_answers_are_given_once_they_lead(self) -> None:
        classifier = made(guard=False)
        queries = samples(30, 1, shift=0.5)[0]
        for _ in range(4):
            classifier.apply(Feedback(0, frozen=0, adapted=2))
        answer = classifier.predict(queries)
        assert answer.frozen is not None
        assert torch.equal(answer.probs, answer.frozen)
        assert "the frozen answers are better" in str(classifier.signs())

    def test_the_chance_of_an_error_is_what_is_stated(self) -> None:
        generator = torch.Generator().manual_seed(0)
        wrong = 0
        for _ in range(2000):
            lead = 0
            while abs(lead) < LEAD:
                lead += 1 if float(torch.rand((), generator=generator)) < ADVANTAGE else -1
            wrong += lead < 0
        assert wrong / 2000 <= ERROR

    def test_refusals(self) -> None:
        classifier = made()
        with pytest.raises(LabelError, match="labels must be between 0 and 2, got 3"):
            classifier.apply(Feedback(3, frozen=0, adapted=1))
        with pytest.raises(AdaNPCError, match="most must be"):
            classifier.ask(samples(3, 0)[0], most=0)
        paper = AdaNPC(MemoryBank(DIM, CLASSES))
        with pytest.raises(AdaNPCError, match="ask needs preset='safe'"):
            paper.ask(samples(3, 0)[0])
        with pytest.raises(AdaNPCError, match="signs needs preset='safe'"):
            paper.signs()
        with pytest.raises(ChangeError, match="feedback needs a bank of the preset 'safe'"):
            paper.apply(Feedback(0, frozen=0, adapted=1))
        with pytest.raises(EmptyBankError, match="learn source rows first"):
            AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe").signs()


def moved_far(count: int, seed: int, shift: float = 4.0) -> tuple[Tensor, Tensor]:
    """Features of eight classes that share a shift by which frozen answers are confused, and their classes."""
    centers = torch.randn(8, 64, generator=torch.Generator().manual_seed(99))
    direction = torch.randn(64, generator=torch.Generator().manual_seed(98))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (count,), generator=generator)
    return centers[labels] + 0.5 * torch.randn(count, 64, generator=generator) + shift * direction, labels


def test_signs_in_words() -> None:
    features, labels = moved_far(300, 6)
    classifier = AdaNPC(MemoryBank(64, 8, soft=True), preset="safe")
    classifier.learn(*moved_far(400, 0, shift=0.0))
    assert "until there are 32" in str(classifier.signs())
    classifier.step(features)
    signs = classifier.signs()
    assert signs.mixed == 1
    assert signs.trust == 1
    assert signs.gain > 0.02
    assert signs.given.low <= signs.given.estimate <= signs.given.high
    accuracy = float((classifier.predict(features).labels == labels).float().mean())
    assert signs.given.estimate == pytest.approx(accuracy, abs=0.15)
    assert "of the answers given" in signs.words
    assert "Classes seem to arrive mixed" in signs.words
    assert "answers are the adapted ones" in signs.words
    alone = made()
    features, labels = samples(300, 6, shift=0.5)
    alone.step(features[labels == 1])
    signs = alone.signs()
    assert signs.mixed < 0.5
    assert "do not seem to arrive mixed" in str(signs)


def test_answers_are_the_frozen_ones_where_adapting_gains_nothing() -> None:
    """Where nothing has changed, neighbors agree with both kinds of answers, and nothing is risked."""
    classifier = made()
    classifier.step(samples(300, 6)[0])
    signs = classifier.signs()
    assert not signs.alarm
    assert signs.agreement > 0.8
    assert signs.gain < 0.01
    assert signs.trust < 0.5
    assert "no better than with the frozen ones" in str(signs)


def test_signs_say_since_when_answers_are_no_longer_trusted() -> None:
    classifier = AdaNPC(MemoryBank(64, 8, soft=True), preset="safe", screen=False)
    classifier.learn(*moved_far(400, 0, shift=0.0))
    classifier.step(moved_far(200, 6)[0])
    signs = classifier.signs()
    assert signs.trusted == signs.queries == 200
    assert "last trusted" not in signs.words
    classifier.step(torch.randn(300, 64, generator=torch.Generator().manual_seed(3)))
    signs = classifier.signs()
    assert signs.trust < 0.5
    assert 200 <= signs.trusted < 400
    assert f"Answers were last trusted {500 - signs.trusted} queries ago: a rollback to there" in signs.words


def test_answers_that_fall_apart_raise_the_alarm() -> None:
    classifier = made(screen=False)
    classifier.step(samples(100, 6)[0])
    assert not classifier.signs().alarm
    classifier.step(torch.randn(400, DIM, generator=torch.Generator().manual_seed(3)))
    signs = classifier.signs()
    assert signs.alarm
    assert "ALARM" in str(signs)
    assert signs.given.estimate < 0.8


def told_apart_by_one(dim: int, strength: float) -> tuple[Tensor, Tensor]:
    """Noise in all directions, and two classes that differ in one of them."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(600) % 2
    features = torch.randn(600, dim, generator=generator)
    features[:, 1] += strength * (labels - 0.5)
    return features, labels


def stripes() -> tuple[Tensor, Tensor]:
    """A circle whose twelve parts are of two classes in turn, so that samples of a class differ most along it."""
    generator = torch.Generator().manual_seed(3)
    part = torch.arange(960) % 12
    angles = torch.pi / 6 * (part + 0.8 * torch.rand(960, generator=generator))
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    return torch.cat([circle, 0.1 * torch.randn(960, 20, generator=generator)], 1), part % 2


class TestRowsThatComeLater:
    """Source rows of an unknown domain need not come all at once."""

    @pytest.mark.parametrize("at_once", [1, 3, 50])
    @pytest.mark.parametrize("one_class_after_another", [False, True])
    def test_a_few_at_a_time_answer_as_well_as_all(self, at_once: int, one_class_after_another: bool) -> None:
        digits = load_digits()
        features = torch.tensor(digits.data).float()
        labels = torch.tensor(digits.target)
        order = torch.arange(400)
        if one_class_after_another:
            order = labels[:400].argsort(stable=True)
        classifier = AdaNPC(MemoryBank(64, 10, soft=True), preset="safe")
        for some in order.split(at_once):
            classifier.learn(features[some], labels[some])
        right = classifier.predict(features[900:1300]).labels == labels[900:1300]
        assert float(right.double().mean()) > 0.85

    def test_later_domains_that_are_named_get_centers_of_their_own(self) -> None:
        features, labels = samples(200, 9)
        moved, later_labels = samples(200, 10, shift=3.0)
        off_center = {}
        for domain in (-1, 1):
            classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe")
            classifier.learn(features, labels, domain=0)
            classifier.learn(moved, later_labels, domain=domain)
            rows = classifier.bank.contents.rows(torch.arange(200, 400))
            off_center[domain] = float(rows.mean(0).norm())
        assert off_center[1] < 0.5 * off_center[-1]


class TestTransform:
    def test_one_row_has_the_bits_of_a_batch(self) -> None:
        features, labels = samples(200, 9)
        transform = fitted(features, labels, labels * 0, CLASSES)
        together = transform(features)
        assert torch.equal(torch.cat([transform(row[None]) for row in features]), together)
        assert torch.equal(transform.to(torch.device("cpu"))(features), together)

    @pytest.mark.parametrize("dim", [5, 300])
    def test_it_whitens_the_strongest_directions(self, dim: int) -> None:
        generator = torch.Generator().manual_seed(3)
        labels = torch.arange(400) % 2
        spread = torch.randn(400, 1, generator=generator) * torch.eye(dim)[0]
        features = 0.3 * torch.randn(400, dim, generator=generator) + 3 * spread + labels[:, None] * torch.eye(dim)[1]
        transform = fitted(features, labels, labels * 0, 2)
        assert abs(float(transform.directions[0, 0])) > 0.9
        before = (features.sign() * features.abs().sqrt())[:, 0].var()
        after = transform(features)[:, 0].var()
        assert float(after) < 0.5 * float(before)

    def test_few_wide_rows_have_the_directions_of_their_scatter(self) -> None:
        generator = torch.Generator().manual_seed(0)
        left = torch.linalg.qr(torch.randn(20, 20, generator=generator, dtype=torch.float64)).Q
        right = torch.linalg.qr(torch.randn(400, 20, generator=generator, dtype=torch.float64)).Q
        lengths = torch.tensor([9.0, 5.0, 3.0] + [0.1] * 17, dtype=torch.float64)
        rows = (left * lengths) @ right.T
        values, directions = strongest(rows, 3)
        expected, vectors = torch.linalg.eigh(rows.T @ rows)
        assert torch.allclose(values, expected[-3:].flip(0))
        overlap = (directions @ vectors[:, -3:].flip(1)).abs()
        assert torch.allclose(overlap, torch.eye(3, dtype=torch.float64), atol=1e-6)

    @pytest.mark.parametrize("rows", [12, 60])
    def test_what_tells_classes_apart_is_a_ridge_regression(self, rows: int) -> None:
        """Computed with as many equations as dimensions, or as rows if these are fewer."""
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(rows) % 3
        offsets = torch.randn(rows, 40, generator=generator, dtype=torch.float64)
        telling, added = amplification(offsets, labels)
        unit_rows = offsets / offsets.norm(dim=1, keepdim=True)
        targets = torch.eye(3, dtype=torch.float64)[labels] - 1 / 3
        scatter = unit_rows.T @ unit_rows + 10 * torch.eye(40, dtype=torch.float64)  # classes are of the same size
        regression = torch.linalg.inv(scatter) @ (unit_rows.T @ targets)
        directions, strengths, _ = torch.linalg.svd(regression, full_matrices=False)
        overlap = (telling @ directions[:, :2]).abs()
        assert torch.allclose(overlap, torch.eye(2, dtype=torch.float64), atol=1e-3)
        gain = (1 + strengths[:2].square()).sqrt() - 1
        assert torch.allclose(added.norm(dim=1), gain, atol=1e-3)

    def test_the_root_is_left_out_where_it_does_harm(self) -> None:
        """Pixels of digits on a black ground, which the root makes gray as soon as there is any noise."""
        digits = load_digits()
        features = torch.tensor(digits.data[:1000]).float()
        labels = torch.tensor(digits.target[:1000])
        domain = torch.zeros(1000, dtype=torch.int64)
        assert not suitable_parts(features, labels, domain, 10).root
        assert float(fitted(features, labels, domain, 10).power) == 1

    def test_the_root_is_kept_where_few_coordinates_would_decide(self) -> None:
        """Classes by many small coordinates, beside a few that are large and say nothing."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(1200) % 4
        centers = torch.rand(4, 100, generator=generator)
        small = centers[labels] + 0.1 * torch.rand(1200, 100, generator=generator)
        large = 200 * torch.rand(1200, 3, generator=generator) ** 4
        features = torch.cat([large, small], 1)
        domain = torch.zeros(1200, dtype=torch.int64)
        assert suitable_parts(features, labels, domain, 4).root
        assert float(fitted(features, labels, domain, 4).power) == 0.5
        assert float(fit(features, labels, domain, 4, Parts()).power) == 1

    def test_the_root_is_left_out_only_if_it_loses_on_all_rows_and_in_most_domains(self) -> None:
        def marks(wrong: list[int]) -> list[Tensor]:
            """Which answers are right in a large domain and two small ones, given how many are not."""
            sizes = (1000, 200, 200)
            return [torch.arange(size) >= count for size, count in zip(sizes, wrong, strict=True)]

        without_root = marks([50, 20, 20])
        assert _root_suits_domains(marks([150, 20, 20]), without_root, 1400)  # the large domain alone loses
        assert _root_suits_domains(marks([0, 40, 40]), without_root, 1400)  # the small ones do, but all together gain
        assert not _root_suits_domains(marks([150, 40, 20]), without_root, 1400)
        assert not _root_suits_domains(marks([60, 40, 40]), without_root, 1400)

    def test_with_one_domain_the_root_is_left_out_only_if_it_loses_probably_and_notably(self) -> None:
        def marks(right: int) -> Tensor:
            return torch.arange(1000) < right

        assert _root_suits_rows(marks(900), marks(907))  # probably, but by too little
        assert not _root_suits_rows(marks(900), marks(908))
        assert _root_suits_rows(marks(9)[:10], marks(10)[:10])  # by much, but perhaps by chance
        assert _root_suits_rows(marks(908), marks(900))

    def test_domains_that_share_no_class_are_tried_as_one(self) -> None:
        digits = load_digits()
        features = torch.tensor(digits.data[:1000]).float()
        labels = torch.tensor(digits.target[:1000])
        assert suitable_parts(features, labels, labels, 10) == suitable_parts(features, labels, labels * 0, 10)
        assert not suitable_parts(features, labels, labels, 10).root

    def test_without_queries_the_root_is_used(self) -> None:
        """Every class has a single row, so none of them can be left out and asked."""
        assert suitable_parts(torch.eye(4), torch.arange(4), torch.zeros(4).long(), 4).root

    def test_rows_of_each_class_in_turn_leave_no_class_out(self) -> None:
        labels = torch.arange(90) % 3
        for out in _left_out(labels, torch.zeros(90, dtype=torch.int64)):
            assert labels[~out].unique().tolist() == [0, 1, 2]

    def test_several_domains_are_amplified_unless_that_clearly_loses(self) -> None:
        """Noise without classes: nothing is gained or lost clearly, and that is enough with several domains alone."""
        generator = torch.Generator().manual_seed(6)
        rows = torch.randn(300, 20, generator=generator)
        labels = torch.arange(300) % 3
        together = torch.zeros(300, dtype=torch.int64)
        assert suitable_parts(rows, labels, torch.arange(300) // 150, 3).amplified
        assert not suitable_parts(rows, labels, together, 3).amplified

    def test_nothing_is_damped_that_tells_classes_apart(self) -> None:
        features, labels = stripes()
        domains = torch.arange(len(labels)) // 12 % 2
        assert not suitable_parts(features, labels, domains, 2).damped
        assert len(fitted(features, labels, domains, 2).directions) == 0
        assert len(fit(features, labels, domains, 2, Parts(damped=True)).directions) == 2

    def test_it_amplifies_what_tells_classes_apart(self) -> None:
        """A weak direction among many, which neighbors find hard to see."""
        features, labels = told_apart_by_one(30, 1.5)
        transform = fitted(features, labels, labels * 0, 2)
        assert abs(float(transform.telling[0, 1])) > 0.9
        assert len(transform.telling) == 1
        # A similarity is the plain one and that of the predicted classes: the length along the direction grows alone.
        unit_row = torch.eye(30)[1:2]
        other_row = torch.eye(30)[2:3]
        assert float(transform(unit_row).norm()) > 1.2
        assert float(transform(other_row).norm()) < 1.1

    def test_it_amplifies_nothing_that_neighbors_see_anyway(self) -> None:
        features, labels = told_apart_by_one(8, 6.0)
        assert len(fitted(features, labels, labels * 0, 2).telling) == 0

    def test_it_amplifies_nothing_that_does_not_carry_over_to_another_domain(self) -> None:
        """What tells classes apart in one domain says the opposite in the other."""
        features, labels = told_apart_by_one(30, 1.5)
        domains = torch.arange(len(labels)) // 2 % 2
        assert len(fitted(features, labels, domains, 2).telling) == 1
        features[:, 1] = features[:, 1] * (1 - 2 * domains)
        assert len(fitted(features, labels, domains, 2).telling) == 0

    def test_classes_are_compared_by_half_of_the_rows_that_the_smallest_has(self) -> None:
        features, labels = samples(150, 0)
        smallest = torch.cat([(labels != 2).nonzero()[:, 0], (labels == 2).nonzero()[:12, 0]])
        for rows, expected in ((smallest, 6), (smallest[:-11], 3), (torch.arange(150), 15)):
            transform = fitted(features[rows], labels[rows], labels[rows] * 0, CLASSES)
            assert transform.per_class == expected

    def test_domains_are_centered_where_they_share_classes(self) -> None:
        """In a complete layout a domain has moved by the mean of its class means, less that of all domains."""
        features, labels = samples(120, 0)
        domains = torch.arange(120) % 2
        centers = domain_centers(features.double(), labels, domains)
        for domain in range(2):
            means = [features[(labels == label) & (domains == domain)].double().mean(0) for label in range(CLASSES)]
            assert torch.allclose(centers[domain], torch.stack(means).mean(0), atol=1e-6)

    def test_a_domain_that_has_moved_is_known_by_the_classes_that_it_shares(self) -> None:
        """Classes 0 and 1 in one domain, 1 and 2 in another, which is moved: it is known from class 1 alone."""
        means = torch.eye(4, dtype=torch.float64)[:3]
        shift = torch.eye(4, dtype=torch.float64)[3]
        labels = torch.tensor([0, 1, 1, 2])
        domains = torch.tensor([0, 0, 1, 1])
        centers = domain_centers(means[labels] + domains[:, None] * shift, labels, domains)
        assert torch.allclose(centers[1] - centers[0], shift, atol=0.05)

    def test_domains_of_different_classes_are_centered_together(self) -> None:
        """What tells such domains apart is what tells their classes apart."""
        features, labels = samples(120, 0)
        domains = (labels == 2).long()
        centers = domain_centers(features.double(), labels, domains)
        together = domain_centers(features.double(), labels, domains * 0)
        assert torch.equal(centers[0], centers[1])
        assert torch.equal(centers[0], together[0])
        divided = made_of(features, labels, labels)
        undivided = made_of(features, labels, labels * 0)
        queries, truth = samples(100, 1)
        right = (divided.predict(queries).labels == truth).sum()
        assert right == (undivided.predict(queries).labels == truth).sum()

    def test_fewer_rows_are_compared_where_the_nearest_say_more(self) -> None:
        """Digits are of many shapes; round classes are told apart best by the mean of many rows."""
        digits = load_digits()
        features = torch.tensor(digits.data[:1000]).float()
        labels = torch.tensor(digits.target[:1000])
        for domains in (labels * 0, torch.arange(1000) % 2):
            assert fitted(features, labels, domains, 10).per_class == 3
        round_classes, of_three = samples(600, 0)
        assert fitted(round_classes, of_three, of_three * 0, CLASSES).per_class == 15
        assert fit(features, labels, labels * 0, 10, Parts()).per_class == 15

    def test_novelty_is_a_rank_among_source_rows(self) -> None:
        source, labels = samples(100, 0)
        transform = fitted(source, labels, labels * 0, CLASSES)
        transformed = transform(source)
        means = torch.stack([transformed[labels == label].mean(0) for label in range(CLASSES)])
        rows = torch.nn.functional.normalize(transformed - means.mean(0))
        expected = []
        for row, label in zip(rows, labels, strict=True):
            others = (rows[labels != label] @ row).sort().values
            expected.append(float(others[-10:].mean()))
        assert transform.foreign.tolist() == pytest.approx(sorted(expected), abs=1e-5)
        assert transform.novelty(-1.0) == 1
        assert transform.novelty(float(transform.foreign[49])) == pytest.approx(0.5)
        assert transform.novelty(1.0) == 0

    def test_rows_without_any_spread(self) -> None:
        transform = fitted(torch.eye(3), torch.arange(3), torch.zeros(3, dtype=torch.int64), 3)
        assert transform.directions.shape == (0, 3)
        one = fitted(torch.ones(1, 3), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 3)
        assert torch.isfinite(one(torch.ones(1, 3))).all()


class TestChanges:
    def test_the_transform_goes_through_bytes(self) -> None:
        classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe")
        features, labels = samples(60, 0)
        transform = fitted(features, labels, labels * 0, CLASSES)
        change = Append(features, labels, centered=True, transform=transform)
        classifier.apply(decode(encode(change)))
        held = classifier.bank.contents.statistics.transform
        assert held is not None
        assert torch.equal(held.directions, transform.directions)

    def test_a_rollback_brings_the_stream_back(self) -> None:
        classifier = made()
        features, _ = samples(50, 1)
        classifier.step(features[:20])
        earlier = classifier.bank.contents
        before = classifier.predict(features[20:])
        classifier.step(features[20:])
        classifier.apply(decode(encode(classifier.rollback(earlier))))
        assert torch.equal(classifier.predict(features[20:]).probs, before.probs)

    def test_a_rollback_to_before_the_source_drops_the_transform(self) -> None:
        classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe")
        empty = classifier.bank.contents
        classifier.learn(*samples(60, 0))
        with_source = classifier.bank.contents
        classifier.apply(classifier.rollback(empty))
        assert classifier.bank.contents.statistics.transform is None
        with pytest.raises(ChangeError, match="cannot bring back a transform"):
            classifier.apply(classifier.rollback(with_source))

    def test_forged_parts_are_refused(self) -> None:
        classifier = made()
        features, labels = samples(2, 1)
        good = classifier.bank.contents.statistics.transform
        assert good is not None
        bad = [
            replace(good, power=good.power / 4),
            replace(good, power=good.power[:0]),
            replace(good, origin=good.origin + 1e-9),
            replace(good, origin=good.origin[:2]),
            replace(good, directions=good.directions * 3, damped=good.damped),
            replace(good, damped=good.damped[:0]),
            replace(good, span=good.span.float()),
            replace(good, span=good.span * torch.nan),
            replace(good, telling=good.origin[None]),
            replace(good, voters=good.voters + 0.5),
            replace(good, voters=good.voters[:0]),
            replace(good, telling=good.span, amplified=good.span * 100),
            replace(good, foreign=good.foreign.float()),
            replace(good, foreign=good.foreign.flip(0)),
            replace(good, calibration=good.calibration[:3]),
            replace(good, calibration=-good.calibration),
        ]
        for transform in bad:
            with pytest.raises(TableError):
                classifier.apply(Append(features, labels, centered=True, transform=transform))
        length = packed_length(DIM, CLASSES)
        forged = (
            (0, -1.0), (0, 0.5), (2, 3.0), (5, 0.5), (1, torch.nan), (7, 2.0), (10, -1.0), (11, 0.5), (13, 3.0),
            (14, 2.0), (15, -2.0), (length - 1, -0.1),
        )  # fmt: skip
        for place, value in forged:
            stream = torch.zeros(length, dtype=torch.float64)
            stream[11] = 1.0
            stream[place] = value
            with pytest.raises(TableError):
                classifier.apply(Append(features, labels, centered=True, stream=stream))
        with pytest.raises(TableError, match="must be float64"):
            classifier.apply(Append(features, labels, centered=True, stream=torch.zeros(3)))

    def test_half_a_transform_in_bytes_is_refused(self) -> None:
        features, labels = samples(60, 0)
        data = encode(Append(features, labels, centered=True, transform=fitted(features, labels, labels * 0, CLASSES)))
        with pytest.raises(ChangeError):
            decode(data.replace(b'"transform.span"', b'"transform.spam"'))

    def test_a_rollback_says_plainly_whether_there_was_a_transform(self) -> None:
        classifier = made()
        header, tensors = _unpacked(encode(classifier.rollback(classifier.bank.contents)))
        with pytest.raises(ChangeError, match="transformed must be true or false, got 1"):
            decode(_packed({**header, "transformed": 1}, tensors))


class TestRefusals:
    def test_a_bank_with_hard_labels(self) -> None:
        with pytest.raises(AdaNPCError, match="keeps probabilities in its rows: pass MemoryBank"):
            AdaNPC(MemoryBank(2, 2), preset="safe")

    def test_settings(self) -> None:
        bank = MemoryBank(2, 2, soft=True)
        for options, message in (
            ({"stream": "sorted"}, "stream must be one of unknown, mixed, got 'sorted'"),
            ({"guard": 1}, "guard must be True or False, got 1"),
            ({"home": 1}, "home must be True or False, got 1"),
            ({"balance": 2}, "balance must be a number from 0 to 1, got 2"),
            ({"k": 3}, "the preset 'safe' has no option 'k': it belongs to preset='paper'"),
            ({"steam": "mixed"}, "the preset 'safe' has no option 'steam'; did you mean 'stream'"),
        ):
            with pytest.raises(AdaNPCError, match=message):
                AdaNPC(bank, preset="safe", **options)
        with pytest.raises(AdaNPCError, match="preset must be one of paper, safe, got 'save'"):
            AdaNPC(bank, preset="save")

    def test_no_source_rows(self) -> None:
        classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe")
        features, labels = samples(3, 0)
        with pytest.raises(EmptyBankError, match="learn source rows first"):
            classifier.step(features)
        with pytest.raises(EmptyBankError, match="learn source rows first"):
            classifier.learn(features, labels, origin=Origin.EXPERT)
        classifier = made()
        classifier.apply(Veto(tuple(range(60))))
        with pytest.raises(EmptyBankError, match="or restore vetoed ones"):
            classifier.predict(features)

    def test_bad_rows(self) -> None:
        classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe")
        features, labels = samples(3, 0)
        with pytest.raises(LabelError, match="labels must have shape"):
            classifier.learn(features, labels[:2])
        with pytest.raises(LabelError, match="domain must have shape"):
            classifier.learn(features, labels, domain=torch.arange(2))
        assert list(classifier.learn(features[:0], labels[:0])) == []


def test_more_classes_keep_what_is_known_of_the_stream() -> None:
    classifier = made()
    features, _ = samples(50, 1)
    classifier.step(features)
    wider = adanpc.with_classes(classifier, CLASSES + 2)
    vector = wider.bank.contents.statistics.stream
    old = classifier.bank.contents.statistics.stream
    assert vector is not None
    assert old is not None
    stream = Stream.unpacked(vector, DIM, CLASSES + 2)
    assert stream.adapted.masses[CLASSES:].tolist() == [0, 0]
    assert torch.equal(with_more_classes(old, DIM, CLASSES, CLASSES), old)
    assert wider.predict(features[:5]).labels.tolist() == classifier.predict(features[:5]).labels.tolist()


def test_a_transform_is_a_value() -> None:
    nothing = torch.zeros(0, 2).double()
    transform = Transform(
        power=torch.tensor([0.5]).double(),
        origin=torch.zeros(2).double(),
        directions=nothing,
        damped=nothing,
        telling=nothing,
        amplified=nothing,
        span=nothing,
        foreign=nothing[:, 0],
        calibration=torch.zeros(4).double(),
        voters=torch.tensor([15.0]).double(),
    )
    assert transform(torch.tensor([[1.0, 0.0]])).tolist() == [[1, 0]]
    rooted = transform(torch.tensor([[9.0, -16.0]]))
    assert rooted[0].tolist() == pytest.approx([0.6, -0.8], abs=1e-6)
    plain = replace(transform, power=torch.tensor([1.0]).double())
    assert plain(torch.tensor([[3.0, -4.0]]))[0].tolist() == pytest.approx([0.6, -0.8], abs=1e-6)


class TestFiles:
    def test_a_file_goes_on_where_it_stopped(self, tmp_path: Path) -> None:
        classifier = made({"storage": "int8", "capacity": 20}, balance=0.25)
        features, _ = samples(80, 1, shift=0.5)
        classifier.step(features[:40])
        adanpc.save(classifier, tmp_path / "bank")
        loaded = adanpc.load(tmp_path / "bank")
        assert loaded.digest() == classifier.digest()
        assert loaded.settings == classifier.settings
        assert torch.equal(loaded.step(features[40:]).probs, classifier.step(features[40:]).probs)

    def test_before_anything_was_learned(self, tmp_path: Path) -> None:
        empty = AdaNPC(MemoryBank(DIM, CLASSES, soft=True), preset="safe")
        adanpc.save(empty, tmp_path / "bank")
        assert adanpc.load(tmp_path / "bank").digest() == empty.digest()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 2}, "its settings are not those of format 2"),
            ({"safe": {**SAFE, "stream": "sorted"}}, "stream must be one of unknown, mixed"),
            ({"safe": {**SAFE, "balance": 7}}, "balance must be a number from 0 to 1"),
            ({"safe": {"stream": "mixed", "guard": True}}, "missing or unknown fields"),
        ],
        ids=str,
    )
    def test_forged_settings_are_refused(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        _forge(tmp_path / "bank", change, {})
        with pytest.raises(BankFileError, match=message):
            adanpc.load(tmp_path / "bank")

    def test_a_bank_without_probabilities_is_refused(self, tmp_path: Path) -> None:
        bank = {**MemoryBank(DIM, CLASSES).config(), "soft": False}
        _forge(tmp_path / "bank", {"bank": bank}, {"soft": None})
        with pytest.raises(BankFileError, match="keeps no probabilities"):
            adanpc.load(tmp_path / "bank")

    @pytest.mark.parametrize(
        "columns",
        [
            {"transform.origin": None},
            {"transform.span": None},
            {"transform.span": torch.ones(1, DIM, dtype=torch.float64)},
            {"transform.damped": torch.zeros(DIM + 1, DIM, dtype=torch.float64)},
            {"transform.directions": torch.zeros((), dtype=torch.float64)},
            {"stream": torch.zeros(3, dtype=torch.float64)},
            {"stream": torch.full((packed_length(DIM, CLASSES),), torch.inf, dtype=torch.float64)},
        ],
        ids=lambda columns: str({name: None if column is None else column.shape for name, column in columns.items()}),
    )
    def test_forged_columns_are_refused(self, columns: dict[str, Tensor | None], tmp_path: Path) -> None:
        _forge(tmp_path / "bank", {}, columns)
        with pytest.raises(BankFileError, match="was not loaded"):
            adanpc.load(tmp_path / "bank")


def _forge(path: Path, change: dict[str, Any], columns: dict[str, Tensor | None]) -> None:
    """Writes a file with a true seal whose document and columns were changed; None takes a column away."""
    classifier = made()
    classifier.step(samples(40, 1)[0])
    state = classifier.state()
    document = {**_document(state, {}), **change}
    tensors = {name: column for name, column in {**state["tensors"], **columns}.items() if column is not None}
    document["seal"] = _seal(document, tensors)
    save_file(tensors, path, {KEY: canonical(document)})
