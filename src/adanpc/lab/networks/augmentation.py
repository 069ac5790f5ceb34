"""Random changes of training images, as in DomainBed: crop, flip, colors, gray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, sqrt

import torch
from torch import Tensor

from adanpc.lab.networks.preprocessing import Preprocessing, scaled

LEAST_AREA = 0.7  # of a crop, as a share of the image's
MOST_AREA = 1.0
MOST_RATIO = 4 / 3  # of a crop's sides
JITTER = 0.3  # the largest change of brightness, contrast, saturation and hue
FLIP_PROBABILITY = 0.5
GRAY_PROBABILITY = 0.1
CROP_TRIES = 10  # to draw a crop that lies in the image
LUMA = (0.2989, 0.587, 0.114)  # weights of red, green and blue, ITU-R BT.601


@dataclass(frozen=True)
class Augmented:
    """A preprocessing for training: each image is changed at random, then normalized as ``preprocessing`` says.

    In this order: a crop of 0.7 to 1 of the area, resized to the preprocessing's size; a flip, every second time;
    brightness, contrast, saturation and hue, by up to 0.3 and in random order; gray, one time in ten. Draws from
    torch's global generator, so ``torch.manual_seed`` decides.

    Args:
        preprocessing: its size (without one images keep theirs), interpolation, mean and std; there is no center crop.
    """

    preprocessing: Preprocessing

    def __call__(self, images: Tensor) -> Tensor:
        """The input made of an image (C, H, W), or of a batch (B, C, H, W) with new draws for each of its images."""
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
    """A random part of an image (C, H, W): uniform in area, in the log of its sides' ratio, and in place."""
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
    # The image is too elongated for such a crop: take the largest one from its center.
    crop_height = min(height, round(width * MOST_RATIO))
    crop_width = min(width, round(height * MOST_RATIO))
    top = (height - crop_height) // 2
    left = (width - crop_width) // 2
    return image[:, top : top + crop_height, left : left + crop_width]


def recolored(image: Tensor) -> Tensor:
    """An image (C, H, W) with colors changed at random; without color, only brightness and contrast change."""
    changes: list[Callable[[Tensor, float], Tensor]] = [brightened, contrasted]
    if len(image) == 3:
        changes += [saturated, hue_shifted]
    for place in torch.randperm(len(changes)).tolist():
        change = changes[place]
        unchanged = 0 if change is hue_shifted else 1  # hues are turned by a sum, all else is a factor
        image = change(image, _uniform(unchanged - JITTER, unchanged + JITTER))
    if len(image) == 3 and _uniform(0, 1) < GRAY_PROBABILITY:
        image = gray(image).expand_as(image)
    return image


def brightened(image: Tensor, factor: float) -> Tensor:
    """The image times the factor."""
    return (image * factor).clamp(0, 1)


def contrasted(image: Tensor, factor: float) -> Tensor:
    """The image, with its distance from its average brightness times the factor."""
    mean = gray(image).mean()
    return (mean + (image - mean) * factor).clamp(0, 1)


def saturated(image: Tensor, factor: float) -> Tensor:
    """The color image (3, H, W), with its distance from gray times the factor."""
    brightness = gray(image)
    return (brightness + (image - brightness) * factor).clamp(0, 1)


def hue_shifted(image: Tensor, turns: float) -> Tensor:
    """The color image (3, H, W), with every hue turned on the color circle; value and saturation of HSV stay."""
    red, green, blue = image
    value = image.max(0).values  # (H, W), as all below
    chroma = value - image.min(0).values
    # The hue counts sixths of the circle: red is at 0, green at 2, blue at 4.
    offset = torch.where(value == red, green - blue, torch.where(value == green, blue - red, red - green))
    nearest = torch.where(value == red, 0, torch.where(value == green, 2, 4))
    tiny = torch.finfo(image.dtype).tiny  # grays have no chroma, and any hue will do for them
    hue = nearest + offset / chroma.clamp_min(tiny) + 6 * turns
    # Back to RGB: each channel lies below the value by as much of the chroma as the hue is away from that channel.
    start = torch.tensor([5.0, 3.0, 1.0], device=image.device)[:, None, None]
    distance = (hue + start) % 6  # (3, H, W)
    return value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1)


def gray(image: Tensor) -> Tensor:
    """The brightness (1, H, W) of a color image; any other image is returned as it is."""
    if len(image) != 3:
        return image
    weights = image.new_tensor(LUMA)[:, None, None]
    return (image * weights).sum(0, keepdim=True)


def _uniform(low: float, high: float) -> float:
    """A number between low and high, from torch's global generator."""
    return float(torch.empty(()).uniform_(low, high))
