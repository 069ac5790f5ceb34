"""Random changes of training images, as in DomainBed: crop, flip, color jitter, grayscale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, sqrt

import torch
from torch import Tensor

from adanpc.lab.networks.preprocessing import Preprocessing, scaled

LEAST_AREA = 0.7  # of a crop, as a share of the area of the image
MOST_AREA = 1.0
MOST_RATIO = 4 / 3  # of the sides of a crop
JITTER = 0.3  # the largest change of brightness, contrast, saturation and hue
FLIP_PROBABILITY = 0.5
GRAY_PROBABILITY = 0.1
CROP_TRIES = 10  # attempts to draw a crop that fits into the image
LUMA = (0.2989, 0.587, 0.114)  # weights of red, green and blue, ITU-R BT.601


@dataclass(frozen=True)
class Augmented:
    """A preprocessing for training, which changes each image at random before it is normalized.

    The changes are, in this order: a crop of 0.7 to 1 of the area, resized to the size of the preprocessing; a
    horizontal flip with probability 0.5; brightness, contrast, saturation and hue, each by up to 0.3, in random order;
    and grayscale with probability 0.1. Random numbers come from torch's global generator, so ``torch.manual_seed``
    decides the changes.

    Args:
        preprocessing: provides size (without one, images keep theirs), interpolation, mean and std; its center crop is
            not used.
    """

    preprocessing: Preprocessing

    def __call__(self, images: Tensor) -> Tensor:
        """Returns the input for an image (C, H, W), or for a batch (B, C, H, W) with other changes for each image."""
        if images.ndim == 4:
            return torch.stack([self(image) for image in images])
        image = self.preprocessing.colored(images)
        shape = (image.shape[1], image.shape[2])
        if self.preprocessing.size is not None:
            shape = (self.preprocessing.size, self.preprocessing.size)
        image = scaled(cropped(image), shape, self.preprocessing.interpolation)
        if _uniform(0, 1) < FLIP_PROBABILITY:
            image = image.flip(-1)
        return self.preprocessing.normalize(recolored(image))


def cropped(image: Tensor) -> Tensor:
    """Returns a random part of an image (C, H, W): uniform in area, in the log of its aspect ratio, and in position."""
    # The same rule as torchvision's RandomResizedCrop, with torch's global generator.
    height, width = image.shape[-2:]
    for _ in range(CROP_TRIES):
        area = height * width * _uniform(LEAST_AREA, MOST_AREA)
        ratio = exp(_uniform(-log(MOST_RATIO), log(MOST_RATIO)))
        crop_height = round(sqrt(area / ratio))
        crop_width = round(sqrt(area * ratio))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            top = int(torch.randint(height - crop_height + 1, ()))
            left = int(torch.randint(width - crop_width + 1, ()))
            return image[:, top : top + crop_height, left : left + crop_width]
    # The image is too elongated for such a crop, so take the largest one at its center.
    crop_height = min(height, round(width * MOST_RATIO))
    crop_width = min(width, round(height * MOST_RATIO))
    top = (height - crop_height) // 2
    left = (width - crop_width) // 2
    return image[:, top : top + crop_height, left : left + crop_width]


def recolored(image: Tensor) -> Tensor:
    """Returns an image (C, H, W) with random colors; if it has no color, only brightness and contrast change."""
    changes: list[Callable[[Tensor, float], Tensor]] = [brightened, contrasted]
    if len(image) == 3:
        changes += [saturated, hue_shifted]
    for place in torch.randperm(len(changes)).tolist():
        change = changes[place]
        neutral = 0 if change is hue_shifted else 1  # hue is changed by a sum, the others by a factor
        image = change(image, _uniform(neutral - JITTER, neutral + JITTER))
    if len(image) == 3 and _uniform(0, 1) < GRAY_PROBABILITY:
        image = gray(image).expand_as(image)
    return image


def brightened(image: Tensor, factor: float) -> Tensor:
    """Returns the image times the factor."""
    return (image * factor).clamp(0, 1)


def contrasted(image: Tensor, factor: float) -> Tensor:
    """Returns the image with its differences from its mean brightness scaled by the factor."""
    mean = gray(image).mean()
    return (mean + (image - mean) * factor).clamp(0, 1)


def saturated(image: Tensor, factor: float) -> Tensor:
    """Returns the color image (3, H, W) with its differences from gray scaled by the factor."""
    brightness = gray(image)
    return (brightness + (image - brightness) * factor).clamp(0, 1)


def hue_shifted(image: Tensor, turns: float) -> Tensor:
    """Returns the color image (3, H, W) with all hues turned on the color circle; value and saturation (HSV) stay."""
    red, green, blue = image
    value = image.max(0).values  # (H, W), like all that follows
    chroma = value - image.min(0).values
    # The hue is in sixths of the circle: red is at 0, green at 2, blue at 4.
    offset = torch.where(value == red, green - blue, torch.where(value == green, blue - red, red - green))
    nearest = torch.where(value == red, 0, torch.where(value == green, 2, 4))
    tiny = torch.finfo(image.dtype).tiny  # grays have no chroma; any hue will do for them, but not 0 / 0
    hue = nearest + offset / chroma.clamp_min(tiny) + 6 * turns
    # Back to RGB: a channel lies further below the value the further the hue is from it, by at most the chroma.
    start = torch.tensor([5.0, 3.0, 1.0], device=image.device)[:, None, None]
    distance = (hue + start) % 6  # (3, H, W)
    return value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1)


def gray(image: Tensor) -> Tensor:
    """Returns the brightness (1, H, W) of a color image; returns any other image as it is."""
    if len(image) != 3:
        return image
    weights = image.new_tensor(LUMA)[:, None, None]
    return (image * weights).sum(0, keepdim=True)


def _uniform(low: float, high: float) -> float:
    """Returns a random number between low and high, from torch's global generator."""
    return float(torch.empty(()).uniform_(low, high))
