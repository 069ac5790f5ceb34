"""Every encoder of the registry keeps the same contract, and has the size that was published."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.networks import ENCODERS, SourceModel, WeightsError, build


class Published(NamedTuple):
    """What the papers and libraries say of an encoder, its head included."""

    parameters: str  # in millions
    classes: int
    dim: int
    size: int
    heavy: bool = False  # checked without memory for its weights


PUBLISHED = {
    "convnet": Published("0.37", 0, 128, 28),
    "cifar-resnet-20": Published("0.27", 10, 64, 32),
    "cifar-resnet-56": Published("0.85", 10, 64, 32),
    "wrn-40-2": Published("2.2", 10, 128, 32),
    "wrn-28-10": Published("36.5", 10, 640, 32, heavy=True),
    "resnet-18": Published("11.7", 1000, 512, 224),
    "resnet-50": Published("25.6", 1000, 2048, 224),
    "vit-b16": Published("86.6", 1000, 768, 224, heavy=True),
    "vit-l16": Published("304.3", 1000, 1024, 224, heavy=True),
    "deit-s16": Published("22.1", 1000, 384, 224),
    "deit-b16": Published("86.6", 1000, 768, 224, heavy=True),
    "bit-resnet-50": Published("25.5", 1000, 2048, 224),
    "mixer-b16": Published("59.9", 1000, 768, 224, heavy=True),
    "mixer-l16": Published("208.2", 1000, 1024, 224, heavy=True),
    "efficientnet-lite0": Published("4.7", 1000, 1280, 224),
    "efficientnet-lite1": Published("5.4", 1000, 1280, 240),
    "efficientnet-lite2": Published("6.1", 1000, 1280, 260),
}
LIGHT = [name for name, published in PUBLISHED.items() if not published.heavy]


@cache
def built(name: str) -> SourceModel:
    """A model with real weights, built once: tests leave it as it was."""
    torch.manual_seed(0)
    return build(name, 5).eval()


def inputs(name: str) -> Tensor:
    """Two images; convolutions take small ones too, which saves time."""
    size = PUBLISHED[name].size
    return torch.randn(2, 3, *(2 * [size if "deit" in name else min(size, 64)]))


def test_every_encoder_is_in_the_table() -> None:
    assert list(ENCODERS) == list(PUBLISHED)


@pytest.mark.parametrize("name", ENCODERS)
def test_it_has_as_many_parameters_as_published(name: str) -> None:
    millions, classes, *_ = PUBLISHED[name]
    with torch.device("meta"):
        model = build(name, max(classes, 1), channels=3 if classes else 1)
    measured = model if classes else model.encoder
    count = sum(parameter.numel() for parameter in measured.parameters())
    assert f"{count / 1e6:.{len(millions.split('.')[1])}f}" == millions


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ENCODERS)
def test_features_and_logits_have_their_shapes(name: str) -> None:
    with torch.device("meta"):
        model = build(name, 7, norm=True, dropout=0.1).eval()
        size = model.preprocessing.size or 28
        images = model.preprocessing(torch.rand(2, 3, size, size))
        assert model.features(images).shape == (2, PUBLISHED[name].dim) == (2, model.dim)
        assert model(images).shape == (2, 7)
    assert size == PUBLISHED[name].size
    assert isinstance(model.head, nn.Linear)
    assert model.head.weight.shape == (7, model.dim)


@pytest.mark.parametrize("name", LIGHT)
def test_answers_are_finite_repeatable_and_those_of_each_image_alone(name: str) -> None:
    model, images = built(name), inputs(name)
    with torch.no_grad():
        features = model.features(images)
        assert features.isfinite().all()
        assert torch.equal(model.features(images), features)
        torch.testing.assert_close(model.features(images[1:]), features[1:], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(features[0], features[1])


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LIGHT)
def test_the_gradient_goes_through_every_parameter_to_the_first(name: str) -> None:
    model = built(name)
    gradients = torch.autograd.grad(model(inputs(name)).square().sum(), list(model.parameters()))  # refuses unused ones
    assert gradients[0].any()


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LIGHT)
def test_a_saved_state_builds_the_same_model(name: str, tmp_path: Path) -> None:
    torch.save(built(name).state_dict(), tmp_path / "state.pt")
    again = build(name, 5, weights=tmp_path / "state.pt").eval()
    assert list(again.state_dict()) == list(built(name).state_dict())
    assert all(map(torch.equal, again.state_dict().values(), built(name).state_dict().values()))
    images = inputs(name)[:1]
    assert torch.equal(again(images), built(name)(images))


@pytest.mark.parametrize("name", ["convnet", "cifar-resnet-20", "wrn-40-2", "resnet-18", "deit-s16"])
def test_gray_images_are_taken_if_asked_for(name: str) -> None:
    with torch.device("meta"):
        model = build(name, 3, channels=1).eval()
        size = PUBLISHED[name].size
        assert model(model.preprocessing(torch.rand(2, 1, size, size))).shape == (2, 3)


def test_options_reach_the_source_model() -> None:
    model = build("wrn-40-2", 3, norm=True, dropout=0.25, frozen_batchnorm=True)
    assert isinstance(model.norm, nn.BatchNorm1d)
    assert model.dropout.p == 0.25
    assert model.frozen_batchnorm


def test_the_seed_decides_random_weights() -> None:
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(build("cifar-resnet-20", 3).state_dict()["encoder.layer3.2.conv2.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(
        AdaNPCError,
        match="unknown encoder 'resnet18'; did you mean 'resnet-18'. Available: convnet, .*-lite2, timm:NAME, or ",
    ):
        build("resnet18", 7)


@pytest.mark.parametrize("name", ["timm:no_such_model", "timm:resnet18.no_such_tag"])
def test_an_unknown_name_of_timm_is_refused(name: str) -> None:
    with pytest.raises(AdaNPCError, match=f"timm has no model '{name[5:]}'; timm.list_models"):
        build(name, 7)


def test_a_misspelled_name_of_timm_comes_with_the_right_one() -> None:
    with pytest.raises(AdaNPCError, match="did you mean 'convnext_atto'?"):
        build("timm:convnext_ato", 7)


def test_weights_come_from_one_place(tmp_path: Path) -> None:
    with pytest.raises(AdaNPCError, match="pretrained=True or weights='.*weights.pt', not both"):
        build("resnet-18", 7, pretrained=True, weights=tmp_path / "weights.pt")


def test_networks_without_published_weights_say_so() -> None:
    with pytest.raises(WeightsError, match="no published weights"):
        build("convnet", 10, pretrained=True)


@pytest.mark.parametrize(("classes", "channels"), [(0, 3), (2, 0)])
def test_nothing_is_not_enough(classes: int, channels: int) -> None:
    with pytest.raises(AdaNPCError, match=f"at least 1, got {classes} and {channels}"):
        build("convnet", classes, channels=channels)
