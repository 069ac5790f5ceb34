"""Banks that return to the source, against the same done by hand."""

from __future__ import annotations

from copy import deepcopy
from math import exp, log

import pytest
import torch
from torch import Tensor

from adanpc import core
from adanpc.core import Admission, MemoryBank, Origin
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter
from adanpc.lab.adapt.bank import AdaNPC
from adanpc.lab.adapt.prototypes import T3A
from adanpc.lab.adapt.returning import AdaNPCASR, AdaNPCPeTTA, AdaNPCReset, class_moments
from adanpc.testing.adapters import CLASSES, run, toy_source, toy_stream


def doubtful(kind: type[Adapter], count: int) -> list[Tensor]:
    """Batches of six features, moved so far that their neighbors disagree."""
    generator = torch.Generator().manual_seed(0)
    batches = toy_stream(kind, count)
    return [batch + 2 * batch.std() * torch.randn(batch.shape, generator=generator) for batch in batches]


def test_the_bank_forgets_after_so_many_samples() -> None:
    source = toy_source()
    batches = doubtful(AdaNPCReset, 7)
    answers = run(AdaNPCReset(source, every=12, min_confidence=0.5), batches)
    expected = []
    for start in (0, 2, 4, 6):
        expected += run(AdaNPC(source, min_confidence=0.5), batches[start : start + 2])
    assert all(torch.equal(one, other) for one, other in zip(answers, expected, strict=True))
    assert not torch.equal(torch.cat(answers), torch.cat(run(AdaNPC(source, min_confidence=0.5), batches)))


def test_any_method_can_be_made_to_return() -> None:
    source = toy_source()
    batches = toy_stream(T3A, 4)
    adapter = T3A(source)
    adapter.reset_every = 6
    expected = [run(T3A(source), [batch])[0] for batch in batches]
    assert all(torch.equal(one, other) for one, other in zip(run(adapter, batches), expected, strict=True))


def test_what_was_met_since_the_last_return_is_part_of_the_state() -> None:
    source = toy_source()
    batches = doubtful(AdaNPCReset, 6)
    whole = AdaNPCReset(source, every=18)
    expected = run(whole, batches)
    first = AdaNPCReset(source, every=18)
    run(first, batches[:2])
    first.predict(batches[2])
    second = AdaNPCReset(source, every=18)
    second.load_state_dict(deepcopy(first.state_dict()))
    assert torch.equal(torch.cat(run(second, batches[2:])), torch.cat(expected[2:]))


def test_nothing_can_return_before_it_has_begun() -> None:
    with pytest.raises(AdaNPCError, match="every must be at least 1, got 0"):
        AdaNPCReset(toy_source(), every=0)


def asr_by_hand(batches: list[Tensor], momentum: float, start: float, kept: float, slope: float) -> tuple[Tensor, int]:
    """The answers, and how many returns there were; a bank is made anew of what it keeps."""
    source = toy_source()

    def bank_with(rows: Tensor, labels: Tensor) -> core.AdaNPC:
        model = core.AdaNPC(MemoryBank(16, CLASSES), k=10, temperature=0.1, admission=Admission(min_confidence=0.5))
        model.learn(source.features, source.labels)
        if len(rows):
            model.learn(rows, labels, origin=Origin.ADMITTED)
        return model

    nothing = bank_with(torch.zeros(0, 16), torch.zeros(0, dtype=torch.int64))
    rows: list[Tensor] = []
    labels: list[int] = []
    average = log(start * CLASSES)
    answers = []
    returns = 0
    for batch in batches:
        model = bank_with(torch.stack(rows) if rows else torch.zeros(0, 16), torch.tensor(labels, dtype=torch.int64))
        flips = 0
        probs = []
        for query in batch:
            answer = model.step(query[None])
            probs.append(answer.probs[0])
            flips += int(answer.labels[0] != nothing.predict(query[None]).labels[0])
            if int(answer.joined[0]) >= 0:
                rows.append(query)
                labels.append(int(answer.labels[0]))
        answers += probs
        mean = torch.stack(probs).double().mean(0)
        height = -sum(float(p) * log(float(p)) for p in mean if p > 0)
        if height < average:
            returns += 1
            stay = max(kept - slope * (average - height), 0)
            number = sum(place < stay * len(rows) for place in range(len(rows)))
            rows, labels = rows[:number], labels[:number]
            average = log(start * CLASSES)
        else:
            part = 1 - momentum + momentum * flips / len(batch)
            average = part * average + (1 - part) * height
    return torch.stack(answers), returns


@pytest.mark.parametrize(("kept", "slope"), [(0.5, 20.0), (0.9, 0.5)])
def test_the_latest_rows_go_when_answers_are_alike(kept: float, slope: float) -> None:
    batches = doubtful(AdaNPCASR, 8)
    one_class = batches[3][:1].expand(6, -1) + 0.01 * batches[4]
    batches = [*batches[:4], one_class, *batches[4:]]
    adapter = AdaNPCASR(toy_source(), min_confidence=0.5, start=0.8, kept=kept, slope=slope)
    answers = torch.cat(run(adapter, batches))
    expected, returns = asr_by_hand(batches, 0.15, 0.8, kept, slope)
    assert returns >= 1
    assert torch.equal(answers, expected)


def test_source_rows_never_go() -> None:
    adapter = AdaNPCASR(toy_source(), min_confidence=0.0, start=1.0)
    run(adapter, toy_stream(AdaNPCASR, 3, rows=1))  # a batch of one is sure, so that everything goes
    table = adapter.classifier.bank.table("origin")
    assert len(table["origin"]) == len(toy_source().labels)
    assert (table["origin"] == Origin.SOURCE).all()


def petta_by_hand(batches: list[Tensor], rate: float) -> Tensor:
    source = toy_source()
    features = source.features.double()
    means = [features[source.labels == c].mean(0) for c in range(CLASSES)]
    variances = [features[source.labels == c].var(0) for c in range(CLASSES)]
    moving = [mean.clone() for mean in means]
    growing = core.AdaNPC(MemoryBank(16, CLASSES), k=10, temperature=0.1)
    growing.learn(source.features, source.labels)
    fixed = core.AdaNPC(MemoryBank(16, CLASSES), k=10, temperature=0.1)
    fixed.learn(source.features, source.labels)
    answers = []
    for batch in batches:
        adapted = growing.predict(batch)
        given = adapted.labels.tolist()
        gaps = []
        for label in set(given):
            gaps.append(((moving[label] - means[label]) ** 2 / (variances[label] + 1e-6)).mean())
        share = 1 - exp(-float(sum(gaps) / len(gaps)))
        for label in set(given):
            here = torch.stack([row.double() for row, own in zip(batch, given, strict=True) if own == label]).mean(0)
            moving[label] = (1 - rate) * moving[label] + rate * here
        mixed = (1 - share) * adapted.probs.double() + share * fixed.predict(batch).probs.double()
        answers.append(mixed)
        for row, probs in zip(batch, mixed, strict=True):
            if probs.max() >= 0.6:
                growing.learn(row[None], probs.argmax()[None], origin=Origin.ADMITTED)
    return torch.cat(answers)


def test_drifting_features_bring_the_source_back() -> None:
    batches = doubtful(AdaNPCPeTTA, 6)
    adapter = AdaNPCPeTTA(toy_source(), min_confidence=0.6, rate=0.3)
    answers = torch.cat(run(adapter, batches))
    assert torch.allclose(answers.double(), petta_by_hand(batches, 0.3), atol=1e-6)
    assert not torch.equal(adapter.means, adapter.source_means)
    assert adapter.latest is not None
    assert int((adapter.latest.joined >= 0).sum()) > 0


def test_moments_by_class() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]])
    means, variances = class_moments(features, torch.tensor([0, 0, 2]), 3)
    assert means.tolist() == [[2.0, 4.0], [0.0, 0.0], [5.0, 5.0]]
    assert variances.tolist() == [[2.0, 8.0], [0.0, 0.0], [0.0, 0.0]]
