"""MTL, SagNet and RSC against loops."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Batch
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.features import MTL, RSC, SagNet, WithMean, refilled, restyled
from adanpc.testing.algorithms import advance, assert_same, toy_batches, toy_model, weights

EPS = 1e-5


def unequal(step: int = 0) -> list[Batch]:
    return [Batch(*(part[: 1 + 3 * place] for part in batch)) for place, batch in enumerate(toy_batches(step))]


def plain_encoder(algorithm: MTL) -> nn.Module:
    encoder = algorithm.model.encoder
    assert isinstance(encoder, WithMean)
    return encoder.encoder


@pytest.mark.parametrize("ema", [0.0, 0.5, 0.99, 1.0])
def test_mtl_follows_each_domains_mean_and_sums_the_losses(ema: float) -> None:
    algorithm = MTL(toy_model(), 3, ema=ema, lr=0.0)
    means = np.zeros((3, 16))
    for step in range(4):
        batches = unequal(step)
        expected = 0.0
        for place, batch in enumerate(batches):
            rows = plain_encoder(algorithm)(batch.images).detach().numpy()
            means[place] = ema * rows.mean(0) + (1 - ema) * means[place]
            seen = np.stack([np.concatenate([row, means[place]]) for row in rows])
            expected += cross_entropy(algorithm.model.head(torch.tensor(seen).float()), batch.labels).item()
        assert algorithm.update(batches)["loss"] == pytest.approx(expected, rel=1e-5)
    assert np.allclose(algorithm.means.numpy(), means, atol=1e-6)


def test_mtl_shows_the_head_the_mean_and_not_noise_as_domainbed_does() -> None:
    algorithm, batches = MTL(toy_model(), 3), toy_batches(0)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        algorithm.means.zero_()
        found.append(algorithm.loss(batches)[0].item())
    assert found[0] == found[1]
    features = algorithm.model.eval().features(batches[0].images)
    assert torch.allclose(features[:, 16:], features[:, :16].mean(0).expand(8, -1), atol=1e-6)


def test_mtl_passes_gradients_through_the_batchs_part_of_the_mean() -> None:
    algorithm = MTL(toy_model(), 3, ema=0.3).double()
    algorithm.means.normal_()
    start = algorithm.means.clone()
    batches = [batch._replace(images=batch.images.double()) for batch in unequal()]
    bias = plain_encoder(algorithm).get_parameter("3.bias")

    def loss() -> Tensor:
        algorithm.means.copy_(start)
        return algorithm.loss(batches)[0]

    loss().backward()
    assert bias.grad is not None
    for place in range(0, 16, 5):
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                bias[place] += step
                values.append(loss().item())
                bias[place] -= step
        assert float(bias.grad[place]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_mtl_gives_features_of_twice_the_dimension_for_one_image_too(norm: bool) -> None:
    torch.manual_seed(0)
    algorithm = MTL(SourceModel(toy_model().encoder, 16, 3, norm=norm, dropout=0.2), 3)
    assert np.isfinite(advance(algorithm, range(3))).all()
    model, image = algorithm.model.eval(), toy_batches(0)[0].images[:1]
    row = plain_encoder(algorithm)(image)
    assert model.dim == 32
    assert torch.allclose(model.features(image), model.norm(torch.cat([row, row], 1)))
    assert torch.equal(model.head(model.features(image)), model(image))


def test_an_ema_outside_0_to_1_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="ema must lie between 0 and 1, got 1.5"):
        MTL(toy_model(), 3, ema=1.5)


def parts(row: np.ndarray) -> tuple[np.ndarray, float, float]:
    mean, variance = float(np.mean(row)), float(np.var(row, ddof=1))
    return (row - mean) / np.sqrt(variance + EPS), mean, variance


def test_styles_are_mixed_and_contents_swapped_as_in_the_loops() -> None:
    torch.manual_seed(0)
    features, order, share = torch.randn(6, 5).double(), torch.tensor([2, 0, 1, 5, 4, 3]), torch.rand(6, 1).double()
    mixed, swapped = restyled(features, order, share).numpy(), refilled(features, order).numpy()
    for row, other in enumerate(order.tolist()):
        content, mean, variance = parts(features[row].numpy())
        content_other, mean_other, variance_other = parts(features[other].numpy())
        own = float(share[row])
        variance_mixed = own * variance + (1 - own) * variance_other
        expected = content * np.sqrt(variance_mixed + EPS) + own * mean + (1 - own) * mean_other
        assert np.allclose(mixed[row], expected)
        assert np.allclose(swapped[row], content_other * np.sqrt(variance + EPS) + mean)


def test_restyling_with_ones_own_style_changes_nothing() -> None:
    features = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(restyled(features, torch.tensor([3, 2, 1, 0]), torch.ones(4, 1)), features, atol=1e-6)


def test_swapped_content_gets_no_gradient() -> None:
    torch.manual_seed(0)
    features, order, v = torch.randn(4, 5).double().requires_grad_(), torch.tensor([1, 2, 3, 0]), torch.randn(4, 5)
    (slope,) = torch.autograd.grad((refilled(features, order) * v).sum(), features)
    rows = features.detach().numpy()
    for row in range(4):
        content = parts(rows[int(order[row])])[0]
        _, mean, variance = parts(rows[row])
        through_variance = (v[row].numpy() * content).sum() * (rows[row] - mean) / (4 * np.sqrt(variance + EPS))
        assert np.allclose(slope[row].numpy(), through_variance + v[row].numpy().sum() / 5)


def test_sagnet_makes_the_three_steps_of_its_paper() -> None:
    """With an optimizer each for encoder, head and style head, and a pass of the encoder for each step."""
    algorithm = SagNet(toy_model(), 3, weight=0.5, weight_decay=0.01)
    encoder, head, style = (
        deepcopy(algorithm.model.encoder),
        deepcopy(algorithm.model.head),
        deepcopy(algorithm.style_head),
    )
    e, h, s = (Adam(module.parameters(), lr=1e-3, weight_decay=0.01) for module in (encoder, head, style))
    for step in range(4):
        batches = toy_batches(step)
        torch.manual_seed(step)
        algorithm.update(batches)
        torch.manual_seed(step)
        images, labels = (torch.cat([batch[column] for batch in batches]) for column in (0, 1))
        share, order = torch.rand(24, 1), torch.randperm(24)
        for made in (e, h):
            made.zero_grad()
        cross_entropy(head(restyled(encoder(images), order, share)), labels).backward()
        e.step()
        h.step()
        s.zero_grad()
        cross_entropy(style(refilled(encoder(images), torch.randperm(24))), labels).backward()
        s.step()
        e.zero_grad()
        logs = style(refilled(encoder(images), torch.randperm(24))).log_softmax(1)
        (0.5 * -logs.mean(1).mean()).backward()
        e.step()
    for mine, other in (
        (algorithm.model.encoder, encoder),
        (algorithm.model.head, head),
        (algorithm.style_head, style),
    ):
        assert_same(dict(mine.state_dict()), dict(other.state_dict()), "steps differ", 1e-5)


def test_sagnets_adversary_makes_style_say_less() -> None:
    mild, hard = (SagNet(toy_model(), 3, weight=weight, lr=5e-3) for weight in (0.0, 10.0))
    reports = {}
    for name, algorithm in (("mild", mild), ("hard", hard)):
        for step in range(40):
            torch.manual_seed(step)
            reports[name] = algorithm.update(toy_batches(step))
    assert set(reports["mild"]) == {"loss", "style", "adversary"}
    assert reports["hard"]["adversary"] < reports["mild"]["adversary"]
    assert reports["hard"]["style"] > reports["mild"]["style"]


def test_sagnet_mixes_otherwise_with_another_seed() -> None:
    algorithm, found = SagNet(toy_model(), 3), set()
    for seed in range(5):
        torch.manual_seed(seed)
        found.add(algorithm.loss(toy_batches(0))[0].item())
    assert len(found) == 5


def test_sagnet_refuses_features_of_one_number() -> None:
    with pytest.raises(AdaNPCError, match="SagNet needs features of dimension 2 or more, got 1"):
        SagNet(SourceModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), 1, 3), 3)


def mask(algorithm: RSC, features: np.ndarray, labels: list[int]) -> np.ndarray:
    """What stays: slopes by finite differences, quantiles by sorting, row by row."""

    def logit(row: np.ndarray, label: int) -> float:
        return float(algorithm.model.head(torch.tensor(row)[None])[0, label].item())

    def prob(row: np.ndarray, label: int) -> float:
        return float(algorithm.model.head(torch.tensor(row)[None])[0].softmax(0)[label].item())

    kept, lost = np.ones_like(features, dtype=bool), []
    for place, (row, label) in enumerate(zip(features, labels, strict=True)):
        steps = 1e-5 * np.eye(len(row))
        slopes = [(logit(row + step, label) - logit(row - step, label)) / 2e-5 for step in steps]
        kept[place] = slopes <= np.percentile(slopes, 100 * (1 - algorithm.drop_features))
        lost.append(prob(row, label) - prob(row * kept[place], label))
    spared = np.array(lost) <= np.percentile(lost, 100 * (1 - algorithm.drop_rows))
    return kept | spared[:, None]


@pytest.mark.parametrize(("drop_features", "drop_rows"), [(1 / 3, 1 / 3), (0.5, 0.1), (0.2, 1.0)])
def test_rsc_mutes_what_the_loops_mute(drop_features: float, drop_rows: float) -> None:
    algorithm = RSC(toy_model(), 3, drop_features=drop_features, drop_rows=drop_rows).double()
    torch.manual_seed(0)
    algorithm.model.head = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    features, labels = torch.randn(11, 16).double(), torch.arange(11) % 3
    found = algorithm.kept(features, labels).numpy()
    assert np.array_equal(found, mask(algorithm, features.numpy(), labels.tolist()))
    assert not found.all()


def test_rsc_trains_on_what_is_left_and_on_nothing_else() -> None:
    algorithm, batches = RSC(toy_model(), 3), unequal()
    algorithm.loss(batches)[0].backward()
    found = {name: parameter.grad for name, parameter in algorithm.model.named_parameters()}
    algorithm.zero_grad()
    kept = algorithm.kept(
        algorithm.model.features(torch.cat([batch.images for batch in batches])),
        torch.cat([batch.labels for batch in batches]),
    )
    assert all(parameter.grad is None for parameter in algorithm.model.parameters())
    total, first = torch.zeros(()), 0
    for batch in batches:
        features = algorithm.model.features(batch.images) * kept[first : first + len(batch.labels)]
        total, first = (
            total + cross_entropy(algorithm.model.head(features), batch.labels) / 3,
            first + len(batch.labels),
        )
    total.backward()
    for name, parameter in algorithm.model.named_parameters():
        assert parameter.grad is not None
        before = found[name]
        assert before is not None
        assert torch.allclose(parameter.grad, before, atol=1e-6), name


def test_rsc_mutes_about_the_share_that_is_asked() -> None:
    torch.manual_seed(0)
    algorithm = RSC(SourceModel(nn.Flatten(), 100, 3), 1, drop_features=0.3, drop_rows=0.25)
    kept = algorithm.kept(torch.randn(201, 100), torch.randint(3, (201,)))
    assert (~kept).any(1).sum() == 50
    assert set((~kept).sum(1).tolist()) == {0, 30}


def test_rsc_mutes_none_of_equals_and_nothing_of_a_single_row() -> None:
    algorithm = RSC(toy_model(), 1)
    features = torch.randn(1, 16)
    assert algorithm.kept(features, torch.tensor([1])).all()
    assert algorithm.kept(features.expand(5, -1), torch.ones(5, dtype=torch.int64)).all()
    with torch.no_grad():
        algorithm.model.head.get_parameter("weight").fill_(1.0)
    assert algorithm.kept(torch.randn(5, 16), torch.arange(5) % 3).all()


@pytest.mark.parametrize("settings", [{"drop_features": 0.0}, {"drop_rows": 0.0}])
def test_rsc_that_drops_nothing_is_erm_to_the_bit(settings: dict[str, float]) -> None:
    plain, special = ERM(toy_model(), 3), RSC(toy_model(), 3, **settings)
    advance(plain, range(6))
    advance(special, range(6))
    assert_same(weights(plain), weights(special), "not ERM")


@pytest.mark.parametrize("name", ["drop_features", "drop_rows"])
@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_shares_outside_0_to_1_are_refused(name: str, share: float) -> None:
    with pytest.raises(AdaNPCError, match=f"{name} must lie between 0 and 1, got {share}"):
        RSC(toy_model(), 3, **{name: share})


@pytest.mark.parametrize("kind", [MTL, SagNet, RSC])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_identical_images_and_a_single_class_are_harmless(kind: type[MTL | SagNet | RSC], value: float) -> None:
    algorithm = kind(toy_model(), 3)
    batch = Batch(torch.full((4, 1, 8, 8), value), torch.full((4,), 2), torch.arange(4))
    reports = [algorithm.update([batch] * 3) for _ in range(6)]
    assert np.isfinite([list(report.values()) for report in reports]).all()


def test_constant_features_have_a_style() -> None:
    algorithm = SagNet(SourceModel(nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), 4, 3), 3)
    with torch.no_grad():
        for parameter in algorithm.model.encoder.parameters():
            parameter.zero_()
    assert np.isfinite(advance(algorithm, range(5))).all()
