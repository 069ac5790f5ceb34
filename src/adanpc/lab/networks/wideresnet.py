"""Wide residual networks for CIFAR."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError


class WideResNet(nn.Module):
    """An encoder from images (B, channels, H, W) to features (B, 64 * width), without a head.

    Parameters have the names of the widely used files of weights (AugMix, RobustBench), whose head is called ``fc``.

    Paper: Zagoruyko and Komodakis, Wide Residual Networks, BMVC 2016. Normalization and ReLU come before convolutions.

    Args:
        depth: the number of layers, 6n + 4: 16, 22, 28, 40.
        width: how many times as many channels it has as a CIFAR ResNet.
        channels: the number of channels of the images.
        dropout: the dropout between the two convolutions of a block, in training.
    """

    def __init__(self, depth: int, width: int, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise AdaNPCError(f"the depth of a wide ResNet is 6n + 4 (16, 22, 28, 40), got {depth}")
        self.features = 64 * width
        count = depth // 6  # blocks in each stage
        self.conv1 = _convolution(channels, 16)
        self.block1 = Stage(16, 16 * width, 1, count, dropout)
        self.block2 = Stage(16 * width, 32 * width, 2, count, dropout)
        self.block3 = Stage(32 * width, self.features, 2, count, dropout)
        self.bn1 = nn.BatchNorm2d(self.features)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the features (B, 64 * width) of images."""
        maps = self.block3(self.block2(self.block1(self.conv1(images))))
        return torch.relu(self.bn1(maps)).mean((2, 3))


class Stage(nn.Module):
    """Blocks with the same number of channels; only the first has the stride."""

    def __init__(self, before: int, width: int, stride: int, count: int, dropout: float) -> None:
        super().__init__()
        first = Block(before, width, stride, dropout)
        rest = [Block(width, width, 1, dropout) for _ in range(count - 1)]
        self.layer = nn.Sequential(first, *rest)

    def forward(self, maps: Tensor) -> Tensor:
        """Returns maps (B, width, H / stride, W / stride)."""
        return cast(Tensor, self.layer(maps))


class Block(nn.Module):
    """Two convolutions and a shortcut around them.

    If the number of channels changes, the shortcut is a 1x1 convolution of the activated input.
    """

    def __init__(self, before: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = _convolution(before, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width)
        self.dropout = nn.Dropout(dropout)
        self.convShortcut: nn.Conv2d | None = None  # named as in the published files of weights
        if before != width:
            self.convShortcut = _convolution(before, width, stride, kernel=1)

    def forward(self, maps: Tensor) -> Tensor:
        """Returns maps (B, width, H / stride, W / stride)."""
        active = torch.relu(self.bn1(maps))
        residual = torch.relu(self.bn2(self.conv1(active)))
        residual = self.conv2(self.dropout(residual))
        shortcut = maps if self.convShortcut is None else self.convShortcut(active)
        return cast(Tensor, residual + shortcut)


def _convolution(channels: int, out: int, stride: int = 1, kernel: int = 3) -> nn.Conv2d:
    """Returns a convolution with He initialization by the number of outputs."""
    convolution = nn.Conv2d(channels, out, kernel_size=kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
