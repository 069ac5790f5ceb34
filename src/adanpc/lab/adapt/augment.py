"""Random views of images: changes that should leave the class as it is.

All functions take model inputs (B, C, H, W), of any size and with any number of channels, and return a batch of the
same shape. Every image draws its own change from torch's global generator on the CPU, so a seed gives the same views
on every device.

The inputs are already normalized, so their range is unknown. A change therefore either moves pixels or is affine in
their values: nothing is clipped, posterized, solarized or equalized. Areas that come into view from outside the image
repeat its nearest edge, since the value of black is unknown.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, one_hot

from adanpc.lab.adapt.adapter import BatchError

MOVES = 5  # number of geometric changes in an AugMix chain: turn, shear in x, shear in y, move in x, move in y
LIGHTS = 2  # number of other changes: contrast and brightness
LARGEST_MOVES = torch.tensor([math.pi / 6, 0.3, 0.3, 1 / 3, 1 / 3])  # as in AugMix: radians, slopes, shares of a side


def flip(images: Tensor) -> Tensor:
    """Returns the images, each mirrored left to right with probability one half."""
    draws = torch.rand(_count(images)).to(images.device)
    mirrored = (draws < 0.5)[:, None, None, None]
    return torch.where(mirrored, images.flip(3), images)


def shift(images: Tensor, share: float = 1 / 8) -> Tensor:
    """Returns the images moved by whole pixels: the same as a random crop after padding with the edge.

    Args:
        images: (B, C, H, W).
        share: the largest move, as a share of each side; 1/8 is the usual padding of 4 pixels for 32.
    """
    count = _count(images)
    height, width = images.shape[2:]
    rows = _moved_line(count, height, share).to(images.device)  # (B, H)
    columns = _moved_line(count, width, share).to(images.device)  # (B, W)
    image = torch.arange(count, device=images.device)
    moved = images[image[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (B, H, W, C)
    return moved.permute(0, 3, 1, 2).contiguous()


def crop(images: Tensor, least: float = 0.08) -> Tensor:
    """Returns a random part of each image, resized to the size of the whole.

    Args:
        images: (B, C, H, W).
        least: the smallest part, as a share of the area. Its aspect ratio is that of the image, times a factor from
            3/4 to 4/3.
    """
    count = _count(images)
    areas = least + (1 - least) * torch.rand(count)
    factors = (_signed(count) * math.log(4 / 3)).exp()
    widths = (areas * factors).sqrt().clamp(max=1)  # as shares of the side
    heights = (areas / factors).sqrt().clamp(max=1)
    matrices = torch.zeros(count, 2, 3)
    matrices[:, 0, 0] = widths
    matrices[:, 1, 1] = heights
    matrices[:, 0, 2] = (1 - widths) * _signed(count)  # grid coordinates run from -1 to 1
    matrices[:, 1, 2] = (1 - heights) * _signed(count)
    grid = affine_grid(matrices.to(images), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def warp(images: Tensor, degrees: float = 15.0, move: float = 1 / 16, zoom: float = 0.1) -> Tensor:
    """Returns the images turned, moved and zoomed about their center.

    Args:
        images: (B, C, H, W).
        degrees: the largest turn, either way.
        move: the largest move along each axis, as a share of the side.
        zoom: sizes change by factors from 1 - zoom to 1 + zoom.
    """
    draws = _signed(_count(images), 4)
    turns = draws[:, :1] * math.radians(degrees)
    shears = torch.zeros(len(draws), 2)
    moves = draws[:, 1:3] * move
    factors = 1 + zoom * draws[:, 3]
    matrices = _matrices(torch.cat([turns, shears, moves], 1))
    matrices[:, :2, :2] /= factors[:, None, None]
    return _warped(images, matrices)


def jitter(images: Tensor, strength: float = 0.3) -> Tensor:
    """Returns the images with random contrast, brightness and, if they have three channels, saturation.

    Args:
        images: (B, C, H, W).
        strength: contrast and saturation change by factors from 1 - strength to 1 + strength, brightness by up to
            ``strength`` standard deviations of the image.
    """
    draws = strength * _signed(_count(images), 3).to(images)
    images = _relit(images, draws[:, :2])
    if images.shape[1] != 3:
        return images
    gray = images.mean(1, keepdim=True)
    saturation = 1 + draws[:, 2, None, None, None]
    return gray + saturation * (images - gray)


def augmix(images: Tensor, *, width: int = 3, depth: int = 3, strength: float = 0.3) -> Tensor:
    """Returns each image mixed, in random shares, with versions of itself that went through chains of small changes.

    Each chain makes 1 to ``depth`` changes: a turn, a shear or move along one axis, or a change of contrast or
    brightness. The shares of the chains are drawn from a Dirichlet distribution, and the share of the original image
    is uniform. The geometric changes of a chain are combined into one warp, so pixels are interpolated only once.

    Args:
        images: (B, C, H, W).
        width: the number of chains.
        depth: the length of the longest chain.
        strength: with 1, turns by up to 30 degrees, shears by 0.3, moves by a third of the side, and changes
            contrast and brightness as in ``jitter``.

    Paper:
        Hendrycks et al., AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty, ICLR 2020.

    Differs from the published code:
        Contrast and brightness replace autocontrast, equalize, posterize and solarize, which need to know the range
        of the values. The default strength of 0.3 is its severity 3 of 10.
    """
    count = _count(images)
    # Exponential draws, divided by their sum, follow Dirichlet(1, …, 1).
    draws = torch.empty(count, width).exponential_()
    shares = (draws / draws.sum(1, keepdim=True)).to(images)  # (B, width)
    mixed = torch.zeros_like(images)
    for share in shares.T:
        mixed = mixed + share[:, None, None, None] * _chain(images, depth, strength)
    own_share = torch.rand(count, 1, 1, 1).to(images)
    return own_share * images + (1 - own_share) * mixed


def _chain(images: Tensor, depth: int, strength: float) -> Tensor:
    """Returns each image after its own random chain of changes."""
    count = len(images)
    lengths = torch.randint(1, depth + 1, (count,))
    matrices = torch.eye(3).repeat(count, 1, 1)
    light = torch.zeros(count, LIGHTS)
    for position in range(depth):
        kinds = torch.randint(MOVES + LIGHTS, (count,))
        unfinished = (position < lengths)[:, None]  # chains that are at least this long
        chosen = one_hot(kinds, MOVES + LIGHTS) * unfinished  # at most one change for each image
        sizes = strength * chosen * _signed(*chosen.shape)
        matrices = matrices @ _matrices(LARGEST_MOVES * sizes[:, :MOVES])
        light += sizes[:, MOVES:]
    return _relit(_warped(images, matrices), light)


def _matrices(sizes: Tensor) -> Tensor:
    """Returns the matrices (B, 3, 3) that map pixels of the result to pixels of the image.

    The origin is the center of the image.

    Args:
        sizes: (B, 5): turn, shear in x and y, and move in x and y. Moves are shares of the side along their axis.
    """
    turn, shear_x, shear_y, move_x, move_y = sizes.T
    one = torch.ones_like(turn)
    zero = torch.zeros_like(turn)
    cos = turn.cos()
    sin = turn.sin()
    turned_and_moved = torch.stack([cos, sin, move_x, -sin, cos, move_y, zero, zero, one], 1)
    sheared = torch.stack([one, shear_x, zero, shear_y, one, zero, zero, zero, one], 1)
    return turned_and_moved.view(-1, 3, 3) @ sheared.view(-1, 3, 3)


def _warped(images: Tensor, matrices: Tensor) -> Tensor:
    """Returns the images sampled where matrices (B, 3, 3) map each pixel, by bilinear interpolation."""
    height, width = images.shape[2:]
    # Grid coordinates run from -1 to 1 along each side, whatever its length: moves double, and slopes depend on the
    # ratio of the sides.
    to_grid_units = torch.tensor([[1.0, height / width, 2.0], [width / height, 1.0, 2.0]])
    in_grid_units = matrices[:, :2] * to_grid_units
    grid = affine_grid(in_grid_units.to(images), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def _relit(images: Tensor, light: Tensor) -> Tensor:
    """Returns the images with their contrast and brightness changed.

    Args:
        images: (B, C, H, W).
        light: (B, 2): the change of the contrast, which is 1 at first, and of the brightness, in standard deviations
            of the image.
    """
    contrast, brightness = light.to(images)[:, :, None, None, None].unbind(1)
    mean = images.mean((1, 2, 3), keepdim=True)
    spread = images.std((1, 2, 3), correction=0, keepdim=True)
    return mean + (1 + contrast) * (images - mean) + brightness * spread


def _moved_line(count: int, side: int, share: float) -> Tensor:
    """Returns, for lines moved by a random number of whole pixels, where each pixel is read from (count, side)."""
    most = round(share * side)
    moves = torch.randint(-most, most + 1, (count, 1))
    return (torch.arange(side) + moves).clamp(0, side - 1)


def _signed(*shape: int) -> Tensor:
    """Returns random numbers between -1 and 1."""
    return 2 * torch.rand(*shape) - 1


def _count(images: Tensor) -> int:
    """Returns the number of images, or raises BatchError if the batch does not hold images."""
    if images.ndim != 4:
        raise BatchError(f"views are made of images (B, C, H, W), got a batch of shape {tuple(images.shape)}")
    return len(images)
