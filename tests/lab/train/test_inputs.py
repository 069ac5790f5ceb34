"""Mixup and ARM against loops."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.convnet import ConvNet
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Batch
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.inputs import ARM, Contextual, Mixup, _pairs
from adanpc.testing.algorithms import advance, assert_same, toy_batches, toy_model, weights


def sized(*rows: int) -> list[Batch]:
    return [
        Batch(*(part[:count] for part in batch)) for count, batch in zip(rows, toy_batches(0, len(rows)), strict=True)
    ]


@pytest.mark.parametrize("rows", [(8, 8, 8), (3, 8, 5), (7,)])
def test_mixup_is_that_of_the_loops(rows: tuple[int, ...]) -> None:
    algorithm, batches = Mixup(toy_model(), len(rows), alpha=1.0), sized(*rows)
    torch.manual_seed(5)
    loss, _ = algorithm.loss(batches)
    torch.manual_seed(5)
    pairs, shares, total = _pairs(batches), algorithm._shares(len(rows)), 0.0
    for (a, b), share in zip(pairs, shares, strict=True):
        for row in range(len(a.labels)):
            logits = algorithm(share * a.images[row : row + 1] + (1 - share) * b.images[row : row + 1])[0]
            both = [cross_entropy(logits, label).item() for label in (a.labels[row], b.labels[row])]
            total += (share * both[0] + (1 - share) * both[1]) / len(a.labels) / len(rows)
    assert loss.item() == pytest.approx(total, rel=1e-5)


@given(rows=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=st.integers(0, 2**32))
def test_domains_form_one_circle_and_the_longer_batch_is_cut(rows: list[int], seed: int) -> None:
    batches = [Batch(torch.full((n, 1), i), torch.full((n,), i), torch.arange(n)) for i, n in enumerate(rows)]
    torch.manual_seed(seed)
    following = {}
    for place, (a, b) in enumerate(_pairs(batches)):
        other = int(b.labels[0])
        assert a.labels.unique().tolist() == [place]
        assert b.labels.unique().tolist() == b.images.unique().tolist() == [other]
        assert a.keys.tolist() == b.keys.tolist() == list(range(min(rows[place], rows[other])))
        following[place] = other
    place, seen = 0, []
    for _ in rows:
        seen.append(place)
        place = following[place]
    assert place == 0
    assert sorted(seen) == list(range(len(rows)))


def test_circles_differ_from_draw_to_draw() -> None:
    torch.manual_seed(0)
    batches = [Batch(torch.zeros(1, 1), torch.tensor([i]), torch.zeros(1)) for i in range(3)]
    assert len({tuple(int(b.labels) for _, b in _pairs(batches)) for _ in range(20)}) == 2


def test_a_single_domain_is_mixed_with_other_rows_of_its_own() -> None:
    torch.manual_seed(0)
    ((a, b),) = _pairs(sized(8))
    assert torch.equal(a.images, sized(8)[0].images)
    assert b.keys.tolist() != a.keys.tolist()
    assert b.keys.sort().values.tolist() == a.keys.tolist()
    assert torch.equal(b.images, a.images[b.keys - a.keys[0]])


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 10.0])
def test_shares_have_the_moments_of_a_beta_distribution(alpha: float) -> None:
    torch.manual_seed(1)
    shares = np.array(Mixup(toy_model(), 3, alpha=alpha)._shares(20000))
    assert 0 <= shares.min() <= shares.max() <= 1
    assert shares.mean() == pytest.approx(0.5, abs=0.015)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_mixup_with_alpha_0_is_erm_to_the_bit() -> None:
    plain, special = ERM(toy_model(), 3), Mixup(toy_model(), 3, alpha=0.0)
    advance(plain, range(6))
    advance(special, range(6))
    assert_same(weights(plain), weights(special), "not ERM")


def test_another_seed_mixes_otherwise() -> None:
    algorithm, found = Mixup(toy_model(), 3), set()
    for seed in range(5):
        torch.manual_seed(seed)
        found.add(algorithm.loss(toy_batches(0))[0].item())
    assert len(found) == 5


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="alpha must be 0 or more, got -1"):
        Mixup(toy_model(), 3, alpha=-1)


def context_of(algorithm: ARM) -> Contextual:
    encoder = algorithm.model.encoder
    assert isinstance(encoder, Contextual)
    return encoder


def test_each_domain_gets_the_mean_context_of_its_own_batch() -> None:
    algorithm, batches = ARM(toy_model(), 3).eval(), sized(3, 1, 6)
    encoder = context_of(algorithm)
    total = []
    for batch in batches:
        mean = torch.stack([encoder.context(image[None])[0] for image in batch.images]).mean(0)
        inputs = torch.stack([torch.cat([image, mean]) for image in batch.images])
        logits = algorithm.model.head(encoder.encoder(inputs))
        total.append(cross_entropy(logits, batch.labels).item())
        assert torch.allclose(algorithm(batch.images), logits, atol=1e-6)  # at test: the batch is the context
    assert algorithm.loss(batches)[0].item() == pytest.approx(np.mean(total), rel=1e-5)


def test_the_context_net_is_normalized_over_all_domains() -> None:
    algorithm, batches = ARM(toy_model(), 3), toy_batches(0)
    encoder = context_of(algorithm)
    algorithm.loss(batches)
    first, norm = encoder.context[0], encoder.context[1]
    assert isinstance(norm, nn.BatchNorm2d)
    means = first(torch.cat([batch.images for batch in batches])).mean((0, 2, 3))
    assert norm.running_mean is not None
    assert torch.allclose(norm.running_mean, 0.1 * means, atol=1e-5)


def test_a_prediction_depends_on_its_batch_and_one_image_is_its_own_context() -> None:
    algorithm = ARM(toy_model(), 3)
    advance(algorithm, range(5))
    algorithm.eval()
    images = toy_batches(0)[0].images
    alone, together = algorithm(images[:1]), algorithm(images)[:1]
    assert not torch.allclose(alone, together, atol=1e-6)
    assert torch.allclose(alone, algorithm(images[:1].expand(4, -1, -1, -1))[:1], atol=1e-6)


def test_the_first_layer_keeps_its_weights_and_gets_one_more_channel() -> None:
    torch.manual_seed(0)
    model = SourceModel(ConvNet(3), 128, 10)
    layer = model.encoder.get_submodule("layers.0")
    assert isinstance(layer, nn.Conv2d)
    images, before = torch.rand(2, 3, 8, 8), layer.weight.detach().clone()
    expected = model.eval()(images)
    encoder = context_of(ARM(model, 3).eval())
    assert layer.weight.shape == (64, 4, 3, 3)
    assert torch.equal(layer.weight[:, :3], before)
    blank = torch.cat([images, torch.zeros(2, 1, 8, 8)], 1)
    assert torch.allclose(model.head(encoder.encoder(blank)), expected, atol=1e-5)


def test_the_new_channel_is_drawn_as_in_a_new_layer_of_that_width() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 4000, 3)
    Contextual(nn.Sequential(layer, nn.Flatten()))
    new = layer.weight.detach()[:, 2:]
    bound = 1 / sqrt(3 * 9)
    assert bound * 0.99 < float(new.abs().max()) <= bound
    assert float(new.std()) == pytest.approx(bound / sqrt(3), rel=0.02)


def test_the_optimizer_trains_context_net_and_widened_layer() -> None:
    algorithm = ARM(toy_model(), 3)
    before = weights(algorithm)
    algorithm.update(toy_batches(0))
    still = [
        name for name, _ in algorithm.model.named_parameters() if torch.equal(before[name], weights(algorithm)[name])
    ]
    # A bias before BatchNorm has no effect: its gradient is rounding.
    assert not [name for name in still if "context" not in name or "weight" in name]


class Tokens(nn.Module):
    """Has weights of its own beside its layers, as a vision transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(6))
        self.patches = nn.Sequential(nn.Identity(), nn.Conv2d(1, 6, 4, stride=4), nn.Flatten(2))

    def forward(self, images: Tensor) -> Tensor:
        mean: Tensor = self.patches(images).mean(2)
        return mean + self.token


def test_any_encoder_that_begins_with_a_convolution_will_do() -> None:
    algorithm = ARM(SourceModel(Tokens(), 6, 3), 3)
    assert np.isfinite(advance(algorithm, range(3))).all()
    assert algorithm.eval().model(toy_batches(0)[0].images[:1]).shape == (1, 3)


@pytest.mark.parametrize(
    "encoder",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4)),
        nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 4, 8), nn.Flatten()),
        nn.Sequential(nn.Conv2d(2, 4, 8, groups=2), nn.Flatten()),
        nn.Flatten(),
    ],
)
def test_other_encoders_are_refused_by_name(encoder: nn.Module) -> None:
    with pytest.raises(AdaNPCError, match="ARM needs an encoder that begins with an ungrouped Conv2d"):
        ARM(SourceModel(encoder, 4, 3), 3)


@pytest.mark.parametrize("kind", [Mixup, ARM])
def test_identical_images_and_a_single_class_are_harmless(kind: type[Mixup | ARM]) -> None:
    algorithm = kind(toy_model(), 3)
    batch = Batch(torch.full((4, 1, 8, 8), 0.5), torch.full((4,), 2), torch.arange(4))
    assert np.isfinite([algorithm.update([batch] * 3)["loss"] for _ in range(4)]).all()
    assert algorithm.eval()(batch.images[:1]).isfinite().all()
