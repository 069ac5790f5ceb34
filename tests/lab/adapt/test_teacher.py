"""CoTTA against steps made by hand."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sources
import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import BatchError, Source
from adanpc.lab.adapt.teacher import CoTTA, approach, trainable_scales, usual_confidence, view
from adanpc.testing import check_adapter


def by_the_batch(source: Source) -> nn.Module:
    """A copy of the model whose BatchNorm layers are in training mode, as torch has it."""
    model = deepcopy(source.model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.train()
    return model


def weights(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def student_step(source: Source, batch: Tensor, answers: Tensor, lr: float) -> list[Tensor]:
    """The weights after one step of Adam on the cross-entropy with the answers."""
    model = by_the_batch(source)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    (-(answers * model(batch).softmax(1).log()).sum() / len(batch)).backward()
    optimizer.step()
    return weights(model)


@pytest.mark.parametrize("norm", [*sources.NORMS, "none"])
def test_a_sure_batch_is_answered_by_the_teacher(norm: str) -> None:
    source = sources.source(norm)
    batch = sources.images(9)
    answers = CoTTA(source, threshold=0.0).step(batch)
    torch.testing.assert_close(answers, by_the_batch(source)(batch).detach().softmax(1))


@pytest.mark.parametrize("norm", [*sources.NORMS, "none"])
def test_the_student_learns_and_the_teacher_follows(norm: str) -> None:
    source = sources.source(norm)
    batch = sources.images(9)
    # With views: without them the first student and teacher agree, and the gradient is nothing but rounding.
    adapter = CoTTA(source, lr=0.05, momentum=0.9, restore=0.0, threshold=1.1, views=1)
    torch.manual_seed(7)
    answers = adapter.step(batch)
    start = weights(source.model)
    student = student_step(source, batch, answers.detach(), 0.05)
    teacher = [0.9 * old + 0.1 * new for old, new in zip(start, student, strict=True)]
    torch.testing.assert_close(weights(adapter.model), student, rtol=0, atol=2e-4)
    torch.testing.assert_close(weights(adapter.teacher), teacher, rtol=0, atol=2e-5)
    assert all(torch.equal(one, other) for one, other in zip(weights(adapter.anchor), start, strict=True))
    assert not torch.equal(weights(adapter.teacher)[0], start[0])


def test_an_unsure_batch_is_answered_by_the_mean_logits_of_its_views() -> None:
    source = sources.source("batch2d")
    batch = sources.images(9)
    model = by_the_batch(source)
    torch.manual_seed(7)
    logits = torch.stack([model(view(batch)) for _ in range(4)]).mean(0)
    torch.manual_seed(7)
    answers = CoTTA(source, threshold=1.1, views=4).step(batch)
    torch.testing.assert_close(answers, logits.softmax(1))
    assert not torch.allclose(answers, model(batch).softmax(1), atol=1e-3)


def test_the_source_model_decides_whether_views_are_made() -> None:
    source = sources.source("group")
    batch = sources.images(9)
    plain = source.model(batch).detach().softmax(1)
    confidence = float(plain.amax(1).mean())
    torch.testing.assert_close(CoTTA(source, threshold=confidence - 1e-4).step(batch), plain)
    assert not torch.allclose(CoTTA(source, threshold=confidence + 1e-4).step(batch), plain, atol=1e-3)


def test_by_default_the_threshold_is_what_nearly_all_source_samples_exceed() -> None:
    source = sources.source("batch2d")
    confidences = source.model.head(source.features).softmax(1).amax(1).detach().numpy()
    assert usual_confidence(source) == pytest.approx(np.quantile(confidences, 0.05), abs=1e-6)
    assert CoTTA(source).threshold == pytest.approx(np.quantile(confidences, 0.05) - 0.05, abs=1e-6)


def test_without_source_features_the_threshold_must_be_given() -> None:
    source = sources.source("batch2d")
    empty = replace(source, features=source.features[:0], labels=source.labels[:0])
    with pytest.raises(AdaNPCError, match="no source features to derive the threshold from: give a threshold"):
        CoTTA(empty)
    assert CoTTA(empty, threshold=0.5).step(sources.images(3)).isfinite().all()


@pytest.mark.parametrize("restore", [0.0, 0.3, 1.0])
def test_weights_fall_back_to_the_source_with_the_given_probability(restore: float) -> None:
    source = sources.source("batch2d", channels=3)
    adapter = CoTTA(source, lr=0.05, restore=restore, threshold=0.0)
    torch.manual_seed(0)
    adapter.step(sources.images(9, channels=3))
    same = [
        (one == other).flatten()
        for one, other in zip(weights(adapter.model), weights(source.model), strict=True)
        if one.numel() > 20
    ]
    share = float(torch.cat(same).float().mean())
    count = len(torch.cat(same))
    assert abs(share - restore) <= 4 * (restore * (1 - restore) / count) ** 0.5


@pytest.mark.parametrize("norm", [*sources.NORMS, "none"])
def test_all_weights_of_student_and_teacher_move(norm: str) -> None:
    source = sources.source(norm)
    adapter = CoTTA(source, threshold=0.0, restore=0.0, lr=0.05, momentum=0.5)
    before = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    for seed in range(3):
        adapter.step(sources.images(9, seed=seed))
    moved = {name for name, value in before.items() if not torch.equal(value, adapter.state_dict()[name])}
    names = {name for name, _ in source.model.named_parameters()}
    assert moved == adapter.moving() == {f"{part}.{name}" for part in ("model", "teacher") for name in names}


@pytest.mark.parametrize("shape", [(4, 1, 28, 28), (4, 1, 8, 8), (4, 3, 8, 8), (4, 3, 9, 14), (4, 2, 1, 1)])
def test_views_are_made_of_small_gray_and_odd_images(shape: tuple[int, ...]) -> None:
    images = torch.randn(shape)
    changed = view(images)
    assert changed.shape == images.shape
    assert changed.isfinite().all()
    assert images.numel() < 10 or not torch.equal(changed, images)


def test_one_row_without_statistics_is_refused_by_name_and_changes_nothing() -> None:
    source = sources.source("batch1d")
    batch = sources.images(9)
    adapter = CoTTA(source)
    expected = CoTTA(source)
    with pytest.raises(BatchError, match="use larger batches"):
        adapter.step(batch[:1])
    for one in (adapter, expected):
        torch.manual_seed(0)
        one.step(batch)
    torch.testing.assert_close(weights(adapter.teacher), weights(expected.teacher), rtol=0, atol=0)


def test_no_view_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="views must be at least 1, got 0"):
        CoTTA(sources.source("none"), views=0)


def test_approach_goes_a_share_of_the_way() -> None:
    weight = torch.tensor([1.0, 2.0])
    approach([weight], [torch.tensor([3.0, 0.0])], 0.25)
    assert weight.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(("norm", "count"), [("batch2d", 2), ("batch1d", 2), ("layer", 2), ("group", 2)])
def test_scales_and_shifts_of_every_kind_of_norm_can_be_trained(norm: str, count: int) -> None:
    model = deepcopy(sources.source(norm).model).requires_grad_(False)
    scales = trainable_scales(model, "X")
    assert len(scales) == count
    assert {id(value) for value in model.parameters() if value.requires_grad} == {id(scale) for scale in scales}


def test_a_model_without_scales_is_refused_with_a_remedy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    with pytest.raises(AdaNPCError, match="X trains the scales and shifts .* the model has none: use PLFull or CoTTA"):
        trainable_scales(model, "X")


@pytest.mark.no_cover
@pytest.mark.parametrize("settings", [{"threshold": 1.1, "views": 2, "restore": 0.5}, {"threshold": 0.0, "lr": 0.1}])
def test_the_contract_holds_with_other_settings(settings: dict[str, Any]) -> None:
    check_adapter(CoTTA, **settings)
