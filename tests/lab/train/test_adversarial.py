"""DANN and CDANN against loops, and who moves when."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.train.adversarial import CDANN, DANN, Adversarial
from adanpc.lab.train.algorithm import Batch
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.search import draw
from adanpc.testing.algorithms import advance, assert_same, toy_batches, toy_model, weights

KINDS = [DANN, CDANN]


def unequal(step: int = 0) -> list[Batch]:
    return [Batch(*(part[: 3 + 2 * place] for part in batch)) for place, batch in enumerate(toy_batches(step))]


def moved(algorithm: Adversarial, before: dict[str, Tensor]) -> set[str]:
    """Which children have changed weights."""
    return {
        name.split(".")[0] for name, value in algorithm.state_dict().items() if not torch.equal(value, before[name])
    }


def copy(algorithm: Adversarial) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in algorithm.state_dict().items()}


def entropy(logits: np.ndarray, label: int) -> float:
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label])


def judge(algorithm: Adversarial, row: np.ndarray, domain: int) -> float:
    """The discriminator's loss on one row, layer by layer."""
    layers = [layer for layer in algorithm.discriminator if isinstance(layer, nn.Linear)]
    for place, layer in enumerate(layers):
        row = layer.weight.detach().numpy() @ row + layer.bias.detach().numpy()
        row = np.maximum(row, 0) if place < len(layers) - 1 else row
    return entropy(row, domain)


def oracle(algorithm: Adversarial, batches: list[Batch]) -> tuple[float, float]:
    """The risk and the discriminator's loss: loops over domains and rows, slopes by finite differences."""
    risk, rows = [], []
    for domain, batch in enumerate(batches):
        features = algorithm.model.features(batch.images).detach()
        logits = algorithm.model.head(features).detach().numpy()
        risk.append(np.mean([entropy(row, int(label)) for row, label in zip(logits, batch.labels, strict=True)]))
        rows += [(row, int(label), domain) for row, label in zip(features.numpy(), batch.labels, strict=True)]
    labels = [label for _, label, _ in rows]
    total, slope = 0.0, 0.0
    for row, label, domain in rows:
        told = (
            algorithm.embedding.get_parameter("weight").detach().numpy()[label] if isinstance(algorithm, CDANN) else 0.0
        )
        share = 1 / (labels.count(label) * len(set(labels))) if isinstance(algorithm, CDANN) else 1 / len(rows)
        total += share * judge(algorithm, row + told, domain)
        for axis in range(len(row)):
            step = 1e-6 * np.eye(len(row))[axis]
            rise = judge(algorithm, row + told + step, domain) - judge(algorithm, row + told - step, domain)
            slope += (rise / 2e-6) ** 2 / len(rows)
    return float(np.mean(risk)), total + algorithm.gradient_penalty * slope


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [0.0, 3.0])
@pytest.mark.parametrize(("depth", "lacking"), [(1, False), (3, False), (3, True)])
def test_loss_is_that_of_the_loops(kind: type[Adversarial], penalty: float, depth: int, lacking: bool) -> None:
    algorithm = kind(toy_model(), 3, weight=0.7, gradient_penalty=penalty, mlp_width=10, mlp_depth=depth).double()
    batches = [batch._replace(images=batch.images.double()) for batch in unequal()]
    if lacking:  # class 1 is in no batch
        batches = [batch._replace(labels=batch.labels.where(batch.labels != 1, 2)) for batch in batches]
    loss, parts = algorithm.loss(batches)
    risk, judged = oracle(algorithm, batches)
    assert float(parts["risk"]) == pytest.approx(risk, rel=1e-6)
    assert float(parts["discriminator"]) == pytest.approx(judged, rel=1e-6)
    assert float(loss.detach()) == pytest.approx(risk - 0.7 * judged, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d_steps", [0, 1, 3])
def test_the_discriminator_moves_alone_and_then_the_model_alone(kind: type[Adversarial], d_steps: int) -> None:
    algorithm = kind(toy_model(), 3, d_steps=d_steps, gradient_penalty=0.1)
    for step in range(2 * (d_steps + 1)):
        before = copy(algorithm)
        report = algorithm.update(toy_batches(step))
        judges = {"discriminator", "embedding"} if kind is CDANN else {"discriminator"}
        turn = step % (d_steps + 1) < d_steps
        assert moved(algorithm, before) == (judges if turn else {"model"}), step
        assert set(report) == {"loss", "risk", "discriminator"}
        assert report["loss"] == pytest.approx(
            report["discriminator"] if turn else report["risk"] - report["discriminator"]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_the_discriminator_leaves_no_gradient_in_the_model(kind: type[Adversarial]) -> None:
    algorithm = kind(toy_model(), 3, gradient_penalty=1.0)
    algorithm.update(toy_batches(0))
    assert all(parameter.grad is None for parameter in algorithm.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_lower_the_discriminators_loss_and_the_models_raise_it(kind: type[Adversarial]) -> None:
    algorithm = kind(toy_model(), 3, d_steps=30, weight=100.0, lr=5e-3)
    batches = toy_batches(0)
    judged = [algorithm.update(batches)["discriminator"] for _ in range(30)]
    assert judged[-1] < 0.9 * judged[0]
    before = algorithm.update(batches)["discriminator"]  # the model's step, as it finds the discriminator
    assert algorithm.update(batches)["discriminator"] > before


@pytest.mark.parametrize("kind", KINDS)
def test_without_weight_and_discriminator_steps_it_is_erm_to_the_bit(kind: type[Adversarial]) -> None:
    assert kind.erm is not None
    plain, special = ERM(toy_model(), 3), kind(toy_model(), 3, **kind.erm)
    advance(plain, range(6))
    advance(special, range(6))
    assert_same(weights(plain), weights(special), "not ERM")


def test_optimizers_have_their_own_settings() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "lr_d": 0.3, "weight_decay_d": 0.4, "beta1": 0.6}
    groups = {name: made.param_groups[0] for name, made in DANN(toy_model(), 3, **settings).optimizers.items()}
    assert {name: (group["lr"], group["weight_decay"], group["betas"]) for name, group in groups.items()} == {
        "model": (0.1, 0.2, (0.6, 0.9)),
        "discriminator": (0.3, 0.4, (0.6, 0.9)),
    }
    assert DANN(toy_model(), 3, lr=0.1).optimizers["discriminator"].param_groups[0]["lr"] == 0.1


def test_depth_counts_linear_layers_with_dropout_between_them() -> None:
    layers = DANN(toy_model(), 5, mlp_width=7, mlp_depth=4, mlp_dropout=0.5).discriminator
    sizes = [(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)]
    assert sizes == [(16, 7), (7, 7), (7, 7), (7, 5)]
    assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU, nn.Dropout] * 3 + [nn.Linear]
    assert [layer.p for layer in layers if isinstance(layer, nn.Dropout)] == [0.5] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_in_the_middle_of_a_cycle(kind: type[Adversarial]) -> None:
    settings: dict[str, Any] = {"d_steps": 2, "gradient_penalty": 0.5, "mlp_dropout": 0.1}
    whole, first, second = (kind(toy_model(seed), 3, **settings) for seed in (0, 0, 1))
    advance(whole, range(10))
    advance(first, range(4))
    file = io.BytesIO()
    torch.save(first.checkpoint(), file)
    file.seek(0)
    second.restore(torch.load(file, weights_only=True))
    advance(second, range(4, 10))
    assert_same(copy(whole), copy(second), "does not resume")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_every_draw_of_the_search_trains(kind: type[Adversarial], seed: int) -> None:
    losses = advance(kind(toy_model(), 3, **draw(kind.space, seed)), range(10))
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("kind", KINDS)
def test_identical_images_and_a_single_class_are_harmless(kind: type[Adversarial]) -> None:
    algorithm = kind(toy_model(), 3, gradient_penalty=1.0)
    batch = Batch(torch.full((4, 1, 8, 8), 0.5), torch.full((4,), 2), torch.arange(4))
    reports = [algorithm.update([batch] * 3) for _ in range(6)]
    assert np.isfinite([list(report.values()) for report in reports]).all()


@pytest.mark.parametrize(("name", "value"), [("d_steps", -1), ("mlp_depth", 0), ("mlp_width", 0)])
def test_settings_that_cannot_be_used_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(AdaNPCError, match=f"{name} must be at least .*, got {value}"):
        DANN(toy_model(), 3, **{name: value})


def test_a_single_domain_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="DANN needs at least 2 source domains, got 1"):
        DANN(toy_model(), 1)
