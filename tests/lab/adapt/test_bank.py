"""AdaNPC as a test-time method, alone, retrained and combined."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import e, inf, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from adanpc import core
from adanpc.core import Admission, MemoryBank, Origin
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.bank import AdaNPC, AdaNPCPublished
from adanpc.lab.adapt.combined import AdaNPCETA, AdaNPCTent
from adanpc.lab.adapt.retrained import AdaNPCBN, AdaNPCBNPublished, entropy_of, identity
from adanpc.lab.adapt.statistics import use_batch_statistics
from adanpc.lab.adapt.tent import Tent
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter
from adanpc.testing.adapters import CLASSES, run, toy_source, toy_stream

Kind = type[AdaNPCTent] | type[AdaNPCETA]


def published_by_loops(source: Source, batches: list[Tensor], k: int, temperature: float, threshold: float) -> Tensor:
    """The public code in NumPy, row by row."""
    first = torch.rand(1, source.features.shape[1], generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows = [row / np.linalg.norm(row) for row in torch.cat([first, source.features]).double().numpy()]
    labels, answers = [0, *source.labels.tolist()], []
    for batch in batches:
        joining = []
        for query in batch.double().numpy():
            query = query / np.linalg.norm(query)
            similarity = np.array([row @ query for row in rows])
            near = np.argsort(-similarity, kind="stable")[:k]
            weights = np.exp(similarity[near] / temperature)
            share = np.zeros(CLASSES)
            for weight, place in zip(weights / weights.sum(), near, strict=True):
                share[labels[place]] += weight
            share = (share + 1e-5) / (1 + CLASSES * 1e-5)
            answers.append(share)
            if (np.exp(share) / np.exp(share).sum()).max() >= threshold:
                joining.append((query, int(share.argmax())))
        rows += [query for query, _ in joining]
        labels += [label for _, label in joining]
    return torch.tensor(np.array(answers))


def doubtful(features: Tensor) -> Tensor:
    """Features moved so far that their neighbors disagree."""
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
    return features + 3 * features.std() * noise


@pytest.mark.parametrize("settings", [{"k": 3}, {"centering": "stream"}, {"soft": True}, {"capacity": 4, "k": 5}])
def test_adanpc_is_the_core_one_query_at_a_time(settings: dict[str, int]) -> None:
    source, batches = toy_source(), toy_stream(AdaNPC, 4)
    bank = MemoryBank(16, CLASSES, soft="soft" in settings, capacity=settings.get("capacity"))
    options = {name: value for name, value in settings.items() if name not in ("soft", "capacity")}
    alone = core.AdaNPC(bank, admission=Admission(min_confidence=0.9), **options)  # type: ignore[arg-type]
    alone.learn(source.features, source.labels, domain=0)
    expected = torch.cat([alone.step(query[None]).probs for batch in batches for query in batch])
    adapter = AdaNPC(source, **settings)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(run(adapter, batches)), expected)
    assert adapter.classifier.bank.digest() == alone.bank.digest()
    before = adapter.classifier.bank.digest()
    assert torch.equal(adapter.predict(batches[0]), adapter.predict(batches[0]))
    assert adapter.classifier.bank.digest() == before


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.1])
def test_the_published_way_is_that_of_the_public_code(threshold: float) -> None:
    source, batches = toy_source(), toy_stream(AdaNPCPublished, 4)
    adapter = AdaNPCPublished(source, k=5, temperature=0.2, threshold=threshold)
    answers = torch.cat(run(adapter, batches))
    assert torch.allclose(answers.double(), published_by_loops(source, batches, 5, 0.2, threshold), atol=1e-5)
    joined = len(adapter.bank) - 1 - len(source.labels)
    assert joined == (24 if threshold == 0 else joined)
    assert threshold < 1 or joined == 0  # a softmax of probabilities never gets there
    assert answers.softmax(1).max() <= e / (e + CLASSES - 1)


def test_the_layer_starts_as_the_identity() -> None:
    features = toy_source().features
    assert torch.allclose(identity(features)(features), features, atol=1e-5)


def test_retraining_starts_from_adanpc_and_moves_queries_and_rows_alike() -> None:
    source, batches = toy_source(), [doubtful(batch) for batch in toy_stream(AdaNPCBN, 3)]
    adapter = AdaNPCBN(source, k=20, min_confidence=inf, alpha=10.0)
    plain = AdaNPC(source, k=20, min_confidence=inf)
    assert torch.allclose(adapter.step(batches[0]), plain.step(batches[0]), atol=1e-5)
    moved = adapter.layer(source.features).detach()
    assert not torch.allclose(moved, source.features, atol=1e-3)
    other = Source(source.model, moved, source.labels)
    expected = AdaNPC(other, k=20, min_confidence=inf).step(adapter.layer(batches[1]).detach())
    assert torch.allclose(adapter.step(batches[1]), expected, atol=1e-5)


def test_retraining_descends_the_entropy_of_the_vote() -> None:
    source, batch = toy_source(), doubtful(toy_stream(AdaNPCBN, 1, rows=20)[0])
    adapter = AdaNPCBN(source, k=20, temperature=0.5, min_confidence=inf, alpha=1.0)
    entropies = [float(entropy_of(adapter.step(batch))) for _ in range(30)]
    assert entropies[-1] < 0.9 * entropies[0]


def test_confident_answers_join_as_the_encoder_made_them() -> None:
    source, batch = toy_source(), toy_stream(AdaNPCBN, 1)[0]
    adapter = AdaNPCBN(source, min_confidence=0.5, alpha=1.0)
    sure = adapter.step(batch).max(1)
    chosen = sure.values >= 0.5
    assert chosen.any()
    assert torch.equal(adapter.bank.rows[len(source.labels) :], batch[chosen])
    assert torch.equal(adapter.bank.labels[len(source.labels) :], sure.indices[chosen])


def test_the_published_retraining_joins_once_for_each_step_and_leaves_source_rows_alone() -> None:
    source, batch = toy_source(), toy_stream(AdaNPCBNPublished, 1)[0]
    adapter = AdaNPCBNPublished(source, threshold=0.0, steps=3)
    adapter.step(batch)
    assert len(adapter.bank.rows) == 1 + len(source.labels) + 3 * len(batch)
    assert torch.equal(adapter.bank.rows[1 : 1 + len(source.labels)], normalize(source.features))


def test_entropy_of_certain_and_of_even_votes() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], requires_grad=True)
    entropy = entropy_of(probs)
    assert entropy.item() == pytest.approx(log(3) / 2)
    entropy.backward()
    assert probs.grad is not None
    assert probs.grad.isfinite().all()


def test_the_encoder_moves_as_tent_moves_it_and_the_bank_answers() -> None:
    source, batches = toy_source(), toy_stream(AdaNPCTent, 3)
    adapter, tent = AdaNPCTent(source, k=5, min_confidence=inf), Tent(source)
    bank = AdaNPC(source, k=5, min_confidence=inf)
    for batch in batches:
        with torch.no_grad():
            expected = bank.step(tent.model.features(batch))
        tent.step(batch)
        assert torch.equal(adapter.step(batch), expected)
    moved, alone = adapter.model.state_dict(), tent.model.state_dict()
    assert all(torch.equal(moved[name], value) for name, value in alone.items())


@pytest.mark.parametrize("kind", [AdaNPCTent, AdaNPCETA])
def test_stale_rows_stay_unless_refreshed(kind: Kind) -> None:
    source, batches = toy_source(), toy_stream(kind, 4)
    settings: dict[str, Any] = {"min_confidence": 0.0, "alpha": 3.0}
    if kind is AdaNPCETA:
        settings = {"min_confidence": 0.0, "lr": 0.03}
    stale, fresh = kind(source, **settings), kind(source, **settings, refresh=2)
    run(stale, batches)
    run(fresh, batches)
    ids = torch.arange(len(source.labels))
    given = stale.classifier.bank.rows(ids)
    assert torch.allclose(given, normalize(source.features), atol=1e-5)
    assert not torch.allclose(fresh.classifier.bank.rows(ids), given, atol=1e-3)
    origins = fresh.classifier.bank.table("origin")["origin"]
    assert (origins == Origin.ADMITTED).sum() == 24  # nobody is lost when rows are made anew
    with pytest.raises(AdaNPCError, match="refresh must be at least 1 batch, got 0"):
        kind(source, refresh=0)
    with pytest.raises(AdaNPCError, match="refresh encodes source images again"):
        kind(Source(source.model, source.features, source.labels), refresh=1)


def test_rows_made_anew_keep_their_classes_apart_though_the_source_is_sorted_by_class() -> None:
    """A batch of one class, normalized by its own statistics, would look like any other."""
    torch.manual_seed(0)
    labels = torch.arange(3).repeat_interleave(64)
    images = 3 * torch.eye(4)[labels] + 0.3 * torch.randn(192, 4)
    model = SourceModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 4, 3).train()
    nn.init.eye_(model.encoder.get_parameter("0.weight"))
    for _ in range(50):
        model(images)
    with torch.no_grad():
        features = model.eval().features(images)
    adapter = AdaNPCTent(Source(model, features, labels, images=images.__getitem__), refresh=1, min_confidence=inf)
    adapter.step(images[torch.randperm(192)[:32]])
    rows = adapter.classifier.bank.rows(torch.arange(192))
    means = normalize(torch.stack([rows[labels == label].mean(0) for label in range(3)]))
    assert ((rows @ means.T).argmax(1) == labels).float().mean() > 0.95


def test_source_rows_are_encoded_again_only_if_the_model_has_changed() -> None:
    source, batches = toy_source(), toy_stream(AdaNPCTent, 4)
    images = source.images
    assert images is not None
    asked: list[int] = []

    def counted(rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return images(rows)

    watched = replace(source, images=counted)
    adapter = AdaNPCTent(watched, alpha=3.0, refresh=2)
    for batch in batches:
        adapter.predict(batch)  # each of them meets the model as it was before the stream
    assert sum(asked) == len(source.labels)
    run(adapter, batches)  # the first and the third batch compute the rows, of which the first has them
    assert sum(asked) == 2 * len(source.labels)
    forgetful = AdaNPCTent(source, alpha=3.0, refresh=2)
    run(forgetful, batches)
    assert adapter.classifier.digest() == forgetful.classifier.digest()


def test_streams_that_begin_with_the_same_model_encode_the_source_once() -> None:
    source = toy_source()
    batches = toy_stream(AdaNPCTent, 2)
    images = source.images
    assert images is not None
    asked: list[int] = []

    def counted(rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return images(rows)

    known = replace(source, images=counted, images_digest="some samples")
    once = len(source.labels)
    for kind in (AdaNPCTent, AdaNPCETA):  # both normalize by the batch, and neither has learned before the first one
        shared = torch.cat(run(kind(known, refresh=2), batches))
        alone = torch.cat(run(kind(source, refresh=2), batches))
        assert torch.equal(shared, alone)
    assert sum(asked) == once

    # Anything that the rows depend on makes them anew.
    other_samples = replace(known, images_digest="other samples")
    run(AdaNPCTent(other_samples, refresh=2), batches)
    assert sum(asked) == 2 * once
    other_model = deepcopy(source.model)
    with torch.no_grad():
        next(other_model.encoder.parameters()).mul_(1.5)
    run(AdaNPCTent(replace(other_samples, model=other_model), refresh=2), batches)
    assert sum(asked) == 3 * once
    other_statistics = AdaNPCTent(replace(other_samples, model=other_model), refresh=2)
    use_batch_statistics(other_statistics.model, prior=16)
    run(other_statistics, batches)
    assert sum(asked) == 4 * once


@pytest.mark.no_cover
def test_contract_with_other_settings() -> None:
    check_adapter(AdaNPC, centering="stream", soft=True, capacity=5, rule="paper")
    check_adapter(AdaNPCBN, steps=3, min_confidence=0.0)
    check_adapter(AdaNPCBNPublished, steps=3, threshold=0.0)
    check_adapter(AdaNPCTent, refresh=2)
