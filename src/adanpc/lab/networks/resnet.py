"""Residual networks for CIFAR."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from adanpc.errors import AdaNPCError

WIDTHS = (16, 32, 64)  # of the three stages


class CifarResNet(nn.Module):
    """An encoder from images (B, channels, H, W) to features (B, 64), without a head.

    Parameters have the names of the widely used files of weights, whose head is called ``linear``.

    Paper: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2, with shortcuts of option A.

    Args:
        depth: the number of layers, 6n + 2: 20, 32, 44, 56, 110.
        channels: the number of channels of the images.
    """

    features = WIDTHS[-1]

    def __init__(self, depth: int, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise AdaNPCError(f"the depth of a CIFAR ResNet is 6n + 2 (20, 32, 44, 56, 110), got {depth}")
        self.conv1 = _convolution(channels, WIDTHS[0])
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        first, second, third = WIDTHS
        blocks = depth // 6  # in each stage
        self.layer1 = _stage(first, first, blocks)
        self.layer2 = _stage(first, second, blocks)
        self.layer3 = _stage(second, third, blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the features (B, 64) of images."""
        maps = torch.relu(self.bn1(self.conv1(images)))
        maps = self.layer3(self.layer2(self.layer1(maps)))
        return cast(Tensor, maps.mean((2, 3)))


class Block(nn.Module):
    """Two convolutions and a shortcut around them; if the number of channels doubles, height and width are halved.

    In that case the shortcut takes every second pixel, and has zeros for the new channels, half of them on either side.
    """

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = width // before
        self.zeros = (width - before) // 2
        self.conv1 = _convolution(before, width, self.stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, maps: Tensor) -> Tensor:
        """Returns maps (B, width, H / stride, W / stride)."""
        residual = torch.relu(self.bn1(self.conv1(maps)))
        residual = self.bn2(self.conv2(residual))
        subsampled = maps[..., :: self.stride, :: self.stride]
        shortcut = pad(subsampled, (0, 0, 0, 0, self.zeros, self.zeros))
        return torch.relu(residual + shortcut)


def _stage(before: int, width: int, count: int) -> nn.Sequential:
    """Returns blocks with ``width`` channels; the first takes maps with ``before`` channels."""
    first = Block(before, width)
    rest = [Block(width, width) for _ in range(count - 1)]
    return nn.Sequential(first, *rest)


def _convolution(channels: int, out: int, stride: int = 1) -> nn.Conv2d:
    """Returns a 3x3 convolution with He initialization."""
    convolution = nn.Conv2d(channels, out, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return convolution
