"""Other views of images: random changes that should leave the class as it is.

All take inputs of a model, (B, C, H, W) of any size and channel count, and give as many; every image draws its own
change, from torch's global generator on the CPU, so that a seed means the same on every device. The inputs are
normalized already and their range is unknown. So changes move pixels or are affine in their values: nothing is clipped,
posterized, solarized or equalized, and what comes in from outside repeats the nearest edge, since the value of black is
not known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, one_hot

from adanpc.lab.adapt.adapter import BatchError

MOVES, LIGHTS = 5, 2  # of an AugMix chain: turn, shear and move along both axes; contrast and brightness
LARGEST = torch.tensor([math.pi / 6, 0.3, 0.3, 1 / 3, 1 / 3])  # of the moves, as in AugMix: radians, slopes, sides


def flip(images: Tensor) -> Tensor:
    """Images, each mirrored left to right with probability one half."""
    chosen = torch.rand(_count(images)).to(images.device) < 0.5
    return torch.where(chosen[:, None, None, None], images.flip(3), images)


def shift(images: Tensor, share: float = 1 / 8) -> Tensor:
    """Images moved by whole pixels, up to a share of each side: a random crop after padding by the edge.

    Args:
        images: (B, C, H, W).
        share: of the side; 1/8 is the usual padding by 4 of 32 pixels.
    """
    count, (height, width) = _count(images), images.shape[2:]
    rows, columns = (_moved(count, side, share).to(images.device) for side in (height, width))
    every = torch.arange(count, device=images.device)[:, None, None]
    return images[every, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def warp(images: Tensor, degrees: float = 15.0, move: float = 1 / 16, zoom: float = 0.1) -> Tensor:
    """Images turned, moved and zoomed about their center.

    Args:
        images: (B, C, H, W).
        degrees: the largest turn, either way.
        move: the largest move along each axis, as a share of the side.
        zoom: sizes change by factors from 1 - zoom to 1 + zoom.
    """
    draws = _signed(_count(images), 4)
    turns, moves = draws[:, :1] * math.radians(degrees), draws[:, 1:3] * move
    matrices = _matrices(torch.cat([turns, torch.zeros(len(draws), 2), moves], 1))
    matrices[:, :2, :2] /= (1 + zoom * draws[:, 3])[:, None, None]
    return _warped(images, matrices)


def jitter(images: Tensor, strength: float = 0.3) -> Tensor:
    """Images with other contrast, brightness and, if they have three channels, saturation.

    Args:
        images: (B, C, H, W).
        strength: contrast and saturation change by factors from 1 - strength to 1 + strength; brightness by up to
            this many standard deviations of the image.
    """
    draws = strength * _signed(_count(images), 3).to(images)
    images = _lit(images, draws[:, :2])
    if images.shape[1] != 3:
        return images
    gray = images.mean(1, keepdim=True)
    return gray + (1 + draws[:, 2, None, None, None]) * (images - gray)


def augmix(images: Tensor, *, width: int = 3, depth: int = 3, strength: float = 0.3) -> Tensor:
    """Images mixed with chains of small changes of themselves, in random shares.

    Each chain makes 1 to ``depth`` changes: a turn, a shear or a move along one axis, another contrast or brightness.
    The shares of the chains are drawn from a Dirichlet distribution, that of the image itself is uniform. The moves of
    a chain are one warp: pixels are interpolated once.

    Args:
        images: (B, C, H, W).
        width: how many chains.
        depth: the longest chain.
        strength: 1 turns by up to 30 degrees, shears by 0.3, moves by a third of the side, and changes
            contrast and brightness as in ``jitter``.

    Paper: Hendrycks et al., AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty, ICLR 2020.

    Differs from the published code: contrast and brightness stand for autocontrast, equalize, posterize and solarize,
    which need the range of the values; a default strength of 0.3 is its severity 3 of 10.
    """
    count = _count(images)
    shares = torch.empty(count, width).exponential_()  # divided by their sum: Dirichlet(1, …, 1)
    shares = (shares / shares.sum(1, keepdim=True)).to(images)
    mixed = sum(
        (share[:, None, None, None] * _chain(images, depth, strength) for share in shares.T), torch.zeros_like(images)
    )
    own = torch.rand(count, 1, 1, 1).to(images)
    return own * images + (1 - own) * mixed


def _chain(images: Tensor, depth: int, strength: float) -> Tensor:
    """Every image after its own random chain of changes."""
    lengths = torch.randint(1, depth + 1, (len(images),))
    matrices, light = torch.eye(3).repeat(len(images), 1, 1), torch.zeros(len(images), LIGHTS)
    for place in range(depth):
        chosen = one_hot(torch.randint(MOVES + LIGHTS, (len(images),)), MOVES + LIGHTS) * (place < lengths)[:, None]
        sizes = strength * chosen * _signed(*chosen.shape)  # one change at most for each image
        matrices = matrices @ _matrices(LARGEST * sizes[:, :MOVES])
        light += sizes[:, MOVES:]
    return _lit(_warped(images, matrices), light)


def _matrices(sizes: Tensor) -> Tensor:
    """(B, 3, 3) from pixels of the result to pixels of the image, of turns, shears in x and y, and moves (B, 5).

    The origin is the center; a move is a share of the side along its axis.
    """
    turn, shear_x, shear_y, move_x, move_y = sizes.T
    one, zero = torch.ones_like(turn), torch.zeros_like(turn)
    turned = torch.stack([turn.cos(), turn.sin(), move_x, -turn.sin(), turn.cos(), move_y, zero, zero, one], 1)
    sheared = torch.stack([one, shear_x, zero, shear_y, one, zero, zero, zero, one], 1)
    return turned.view(-1, 3, 3) @ sheared.view(-1, 3, 3)


def _warped(images: Tensor, matrices: Tensor) -> Tensor:
    """Images read at other places, by bilinear interpolation."""
    height, width = images.shape[2:]
    wide = torch.tensor([[1.0, height / width, 2.0], [width / height, 1.0, 2.0]])  # to the units of the grid
    grid = affine_grid((matrices[:, :2] * wide).to(images), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def _lit(images: Tensor, light: Tensor) -> Tensor:
    """Images with more contrast, and brighter by so many standard deviations, (B, 2)."""
    contrast, brightness = light.to(images)[:, :, None, None, None].unbind(1)
    mean, spread = images.mean((1, 2, 3), keepdim=True), images.std((1, 2, 3), correction=0, keepdim=True)
    return mean + (1 + contrast) * (images - mean) + brightness * spread


def _moved(count: int, side: int, share: float) -> Tensor:
    """(count, side) where each pixel of a line is read, if the line is moved by whole pixels."""
    most = round(share * side)
    return (torch.arange(side) + torch.randint(-most, most + 1, (count, 1))).clamp(0, side - 1)


def _signed(*shape: int) -> Tensor:
    """Draws between -1 and 1."""
    return 2 * torch.rand(*shape) - 1


def _count(images: Tensor) -> int:
    if images.ndim != 4:
        raise BatchError(f"views are made of images (B, C, H, W), got a batch of shape {tuple(images.shape)}")
    return len(images)
