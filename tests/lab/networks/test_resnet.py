"""CIFAR ResNets against a forward pass in plain functional calls, over a file laid out as the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d

from adanpc.errors import AdaNPCError
from adanpc.lab.networks import WeightsError, build
from adanpc.lab.networks.resnet import CifarResNet

State = dict[str, Tensor]


def published(depth: int, classes: int = 10) -> State:
    """Random tensors under the names of the published files."""
    state: State = {"conv1.weight": torch.randn(16, 3, 3, 3) / 5}
    _norm(state, "bn1", 16)
    before = 16
    for stage, width in ((1, 16), (2, 32), (3, 64)):
        for block in range((depth - 2) // 6):
            name = f"layer{stage}.{block}"
            state[f"{name}.conv1.weight"] = torch.randn(width, before, 3, 3) / (3 * before**0.5)
            _norm(state, f"{name}.bn1", width)
            state[f"{name}.conv2.weight"] = torch.randn(width, width, 3, 3) / (3 * width**0.5)
            _norm(state, f"{name}.bn2", width)
            before = width
    state["linear.weight"], state["linear.bias"] = torch.randn(classes, 64), torch.randn(classes)
    return {f"module.{name}": value for name, value in state.items()}


def _norm(state: State, name: str, width: int) -> None:
    state[f"{name}.weight"], state[f"{name}.bias"] = torch.rand(width) + 0.5, torch.randn(width) / 5
    state[f"{name}.running_mean"], state[f"{name}.running_var"] = torch.randn(width) / 5, torch.rand(width) + 0.5
    state[f"{name}.num_batches_tracked"] = torch.tensor(7)


def by_hand(state: State, images: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Features and logits, one call after another."""

    def normed(name: str, maps: Tensor) -> Tensor:
        mean, var, weight, bias = (state[f"module.{name}.{key}"] for key in NORM)
        return batch_norm(maps, mean, var, weight, bias, training=False)

    maps = normed("bn1", conv2d(images, state["module.conv1.weight"], padding=1)).relu()
    for stage in (1, 2, 3):
        for block in range((depth - 2) // 6):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            made = conv2d(maps, state[f"module.{name}.conv1.weight"], stride=stride, padding=1)
            made = conv2d(normed(f"{name}.bn1", made).relu(), state[f"module.{name}.conv2.weight"], padding=1)
            if stride == 2:
                kept = maps[:, :, ::2, ::2]
                zeros = torch.zeros_like(kept)[:, : kept.shape[1] // 2]
                maps = torch.cat([zeros, kept, zeros], 1)
            maps = (normed(f"{name}.bn2", made) + maps).relu()
    features = maps.flatten(2).mean(2)
    return features, features @ state["module.linear.weight"].T + state["module.linear.bias"]


NORM = ("running_mean", "running_var", "weight", "bias")


@pytest.mark.parametrize("depth", [20, 56])
def test_a_published_file_gives_the_same_features_and_logits_as_plain_calls(tmp_path: Path, depth: int) -> None:
    torch.manual_seed(depth)
    state, images = published(depth), torch.rand(3, 3, 32, 32)
    torch.save({"state_dict": state, "best_prec1": 91.7}, tmp_path / "weights.th")
    model = build(f"cifar-resnet-{depth}", 10, weights=tmp_path / "weights.th").eval()
    features, logits = by_hand(state, images, depth)
    torch.testing.assert_close(model.features(images), features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(images), logits, rtol=1e-4, atol=1e-3)


def test_a_head_of_another_width_is_fresh(tmp_path: Path) -> None:
    state = published(20)
    torch.save({"state_dict": state}, tmp_path / "weights.th")
    model = build("cifar-resnet-20", 4, weights=tmp_path / "weights.th").eval()
    images = torch.rand(2, 3, 32, 32)
    assert model(images).shape == (2, 4)
    torch.testing.assert_close(model.features(images), by_hand(state, images, 20)[0], rtol=1e-4, atol=1e-4)


def test_weights_of_another_depth_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": published(56)}, tmp_path / "weights.th")
    with pytest.raises(WeightsError, match="another network: .*layer1.3.conv1.weight") as caught:
        build("cifar-resnet-20", 10, weights=tmp_path / "weights.th")
    assert len(str(caught.value)) < 400


def test_the_names_are_the_published_ones() -> None:
    own = {f"module.{name}": value.shape for name, value in CifarResNet(20).state_dict().items()}
    theirs = {name: value.shape for name, value in published(20).items() if ".linear." not in name}
    assert own == theirs


@pytest.mark.parametrize("depth", [2, 18, 21])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(AdaNPCError, match=rf"6n \+ 2 .*, got {depth}"):
        CifarResNet(depth)
