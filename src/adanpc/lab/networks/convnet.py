"""The paper's network for digits."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

GROUPS = 8  # of every GroupNorm


class ConvNet(nn.Module):
    """An encoder from images (B, channels, H, W) to features (B, 128), without a head.

    It has four 3x3 convolutions with "same" padding, each followed by ReLU and then GroupNorm, and a global average.

    Paper: Table "Details of our MNIST ConvNet architecture", which is that of DomainBed.

    Args:
        channels: of the images; 1 for digits.
    """

    features = 128

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_convolution(channels, 64),
            *_convolution(64, 128, stride=2),
            *_convolution(128, 128),
            *_convolution(128, self.features),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns the features (B, 128) of images (B, channels, H, W)."""
        return cast(Tensor, self.layers(images))


def _convolution(channels: int, out: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Returns one convolution, with the activation and normalization that follow it.

    With a stride of 2 it halves height and width, rounded up.
    """
    convolution = nn.Conv2d(channels, out, kernel_size=3, stride=stride, padding=1)
    return convolution, nn.ReLU(), nn.GroupNorm(GROUPS, out)
