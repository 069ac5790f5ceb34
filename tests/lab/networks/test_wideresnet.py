"""Wide ResNets against a forward pass in plain functional calls, over a file laid out as the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, linear

from adanpc.errors import AdaNPCError
from adanpc.lab.networks import build
from adanpc.lab.networks.wideresnet import Block, WideResNet

State = dict[str, Tensor]


def published(depth: int, width: int, classes: int = 10) -> State:
    """Random tensors under the names of the published files."""
    state: State = {"conv1.weight": torch.randn(16, 3, 3, 3) / 5}
    before = 16
    for stage in (1, 2, 3):
        out = 16 * width * 2 ** (stage - 1)
        for block in range((depth - 4) // 6):
            name = f"block{stage}.layer.{block}"
            _norm(state, f"{name}.bn1", before)
            state[f"{name}.conv1.weight"] = torch.randn(out, before, 3, 3) / (3 * before**0.5)
            _norm(state, f"{name}.bn2", out)
            state[f"{name}.conv2.weight"] = torch.randn(out, out, 3, 3) / (3 * out**0.5)
            if block == 0:
                state[f"{name}.convShortcut.weight"] = torch.randn(out, before, 1, 1) / before**0.5
            before = out
    _norm(state, "bn1", before)
    state["fc.weight"], state["fc.bias"] = torch.randn(classes, before), torch.randn(classes)
    return {f"module.{name}": value for name, value in state.items()}


def _norm(state: State, name: str, width: int) -> None:
    state[f"{name}.running_mean"], state[f"{name}.running_var"] = torch.randn(width) / 5, torch.rand(width) + 0.5
    state[f"{name}.weight"], state[f"{name}.bias"] = torch.rand(width) + 0.5, torch.randn(width) / 5


def by_hand(state: State, images: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Features and logits, one call after another."""

    def weight(name: str) -> Tensor:
        return state[f"module.{name}.weight"]

    def active(name: str, maps: Tensor) -> Tensor:
        mean, var, bias = (state[f"module.{name}.{key}"] for key in ("running_mean", "running_var", "bias"))
        return batch_norm(maps, mean, var, weight(name), bias, training=False).relu()

    maps = conv2d(images, weight("conv1"), padding=1)
    for stage in (1, 2, 3):
        for block in range((depth - 4) // 6):
            name, stride = f"block{stage}.layer.{block}", 2 if stage > 1 and block == 0 else 1
            start = active(f"{name}.bn1", maps)
            made = active(f"{name}.bn2", conv2d(start, weight(f"{name}.conv1"), stride=stride, padding=1))
            made = conv2d(made, weight(f"{name}.conv2"), padding=1)
            maps = made + (conv2d(start, weight(f"{name}.convShortcut"), stride=stride) if block == 0 else maps)
    features = avg_pool2d(active("bn1", maps), 8).flatten(1)
    return features, linear(features, weight("fc"), state["module.fc.bias"])


def test_a_published_file_gives_the_same_features_and_logits_as_plain_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state, images = published(40, 2), torch.rand(2, 3, 32, 32)
    torch.save({"state_dict": state}, tmp_path / "weights.pt")
    model = build("wrn-40-2", 10, weights=tmp_path / "weights.pt").eval()
    features, logits = by_hand(state, images, 40)
    torch.testing.assert_close(model.features(images), features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(images), logits, rtol=1e-4, atol=1e-3)


def test_dropout_lies_between_the_convolutions_and_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    block, maps = Block(4, 4, 1, dropout=1.0), torch.randn(2, 4, 5, 5)
    assert torch.equal(block(maps), maps)  # nothing reaches the second convolution
    assert not torch.equal(block.eval()(maps), maps)
    assert not torch.equal(WideResNet(10, 1, dropout=0.5)(torch.rand(2, 3, 8, 8)), torch.zeros(2, 64))


@pytest.mark.parametrize("depth", [4, 20, 26])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(AdaNPCError, match=rf"6n \+ 4 .*, got {depth}"):
        WideResNet(depth, 2)
