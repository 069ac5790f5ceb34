"""Random changes of training images, as in DomainBed: crop, flip, colors, gray."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

import torch
from torch import Tensor

from adanpc.lab.networks.preprocessing import Preprocessing, scaled

SCALE = (0.7, 1.0)  # the crop's share of the image's area
RATIO = 4 / 3  # of the crop's sides, at most
JITTER = 0.3  # of brightness, contrast, saturation and hue
GRAY = 0.1  # how often colors are taken away
TRIES = 10  # to draw a crop that lies in the image
LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601


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
        """The input of an image (C, H, W), or of each image of a batch (B, C, H, W), which is drawn for by itself."""
        if images.ndim == 4:
            return torch.stack([self(image) for image in images])
        image = self.preprocessing.colored(images)
        side = self.preprocessing.size
        shape = (image.shape[1], image.shape[2]) if side is None else (side, side)
        image = scaled(cropped(image), shape, self.preprocessing.interpolation)
        image = image.flip(-1) if _uniform(0, 1) < 0.5 else image
        return self.preprocessing.normalize(recolored(image))


def cropped(image: Tensor) -> Tensor:
    """A random part of an image (C, H, W): uniform in area, in the log of its sides' ratio, and in place."""
    height, width = image.shape[-2:]
    for _ in range(TRIES):
        area, ratio = height * width * _uniform(*SCALE), exp(_uniform(-log(RATIO), log(RATIO)))
        h, w = round(sqrt(area / ratio)), round(sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            top, left = int(torch.randint(height - h + 1, ())), int(torch.randint(width - w + 1, ()))
            return image[:, top : top + h, left : left + w]
    h, w = min(height, round(width * RATIO)), min(width, round(height * RATIO))  # too long for any: its middle
    top, left = (height - h) // 2, (width - w) // 2
    return image[:, top : top + h, left : left + w]


def recolored(image: Tensor) -> Tensor:
    """An image (C, H, W) with colors changed at random; of images without color, brightness and contrast alone."""
    changes = (brightened, contrasted, saturated, hue_shifted) if len(image) == 3 else (brightened, contrasted)
    for change in torch.randperm(len(changes)).tolist():
        center = 0 if changes[change] is hue_shifted else 1
        image = changes[change](image, _uniform(center - JITTER, center + JITTER))
    return gray(image).expand_as(image) if len(image) == 3 and _uniform(0, 1) < GRAY else image


def brightened(image: Tensor, factor: float) -> Tensor:
    """The image times the factor."""
    return (image * factor).clamp(0, 1)


def contrasted(image: Tensor, factor: float) -> Tensor:
    """The image, its distance from its average brightness times the factor."""
    mean = gray(image).mean()
    return (mean + (image - mean) * factor).clamp(0, 1)


def saturated(image: Tensor, factor: float) -> Tensor:
    """The color image (3, H, W), its distance from gray times the factor."""
    middle = gray(image)
    return (middle + (image - middle) * factor).clamp(0, 1)


def hue_shifted(image: Tensor, turns: float) -> Tensor:
    """The color image (3, H, W), every hue turned on the circle; value and saturation of HSV stay."""
    value, low = image.max(0).values, image.min(0).values
    chroma = value - low
    red, green, blue = image
    sector = torch.where(value == red, green - blue, torch.where(value == green, blue - red, red - green))
    start = torch.where(value == red, 0, torch.where(value == green, 2, 4))
    hue = start + sector / chroma.clamp_min(torch.finfo(image.dtype).tiny) + 6 * turns  # six sectors are one turn
    place = (hue + torch.tensor([5.0, 3.0, 1.0], device=image.device)[:, None, None]) % 6  # (3, H, W)
    return value - chroma * torch.minimum(place, 4 - place).clamp(0, 1)


def gray(image: Tensor) -> Tensor:
    """The brightness (1, H, W) of an image; of one without three channels, itself."""
    if len(image) != 3:
        return image
    return (image * image.new_tensor(LUMA)[:, None, None]).sum(0, keepdim=True)


def _uniform(low: float, high: float) -> float:
    return float(torch.empty(()).uniform_(low, high))
