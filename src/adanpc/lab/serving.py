"""What a service for images needs: the encoder that made a bank's features, and the images of its source rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.banks import CHANNELS, LAYER, source_parts
from adanpc.lab.data import read_images
from adanpc.lab.data.domain import Domain
from adanpc.lab.networks import build
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.assemble import load_algorithm
from adanpc.lab.train.run import SPEC, Run
from adanpc.models.inputs import InputError
from adanpc.models.recipe import check_recipe, describe

Pixels = NDArray[np.uint8]  # (H, W, 3)
GRAY = (0.299, 0.587, 0.114)  # the weights of red, green and blue in a gray image, as in ITU-R BT.601


def encoder_of_run(folder: Path, which: str) -> SourceModel:
    """The best or the last model of a run."""
    return load_algorithm(Run(folder), which).model


def encoder_of_name(name: str, classes: int, *, weights: Path | None = None, pretrained: bool = False) -> SourceModel:
    """An encoder as ``bank create`` builds it for images."""
    model = build(name, classes, channels=CHANNELS, weights=weights, pretrained=pretrained)
    return model.eval()


def image_encoder(model: SourceModel, recipe: Mapping[str, str], dim: int) -> Callable[[Sequence[Pixels]], Tensor]:
    """A function from images to features (B, D); refuses a model that does not make features like those of the bank.

    Args:
        model: the model that makes the features.
        recipe: the recipe of the bank; empty if the bank was made from embeddings, whose model is unknown.
        dim: the number of dimensions of the bank.
    """
    if recipe:
        check_recipe(recipe, model, LAYER, describe(model.preprocessing), strict=True)
    if model.dim != dim:
        raise AdaNPCError(
            f"the model makes features of {model.dim} numbers, but the bank has {dim}: choose another model"
        )
    channels = _channels(model)

    def encode(images: Sequence[Pixels]) -> Tensor:
        inputs = [model.preprocessing(_as_floats(pixels, channels)) for pixels in images]
        try:
            with torch.no_grad():
                return model.features(torch.stack(inputs).to(model.device)).float().cpu()
        except RuntimeError as error:
            sizes = sorted({f"{pixels.shape[1]} x {pixels.shape[0]}" for pixels in images})
            raise InputError(f"the model does not accept images of {', '.join(sizes)} pixels: {error}") from error

    return encode


def image_finder(source: Path) -> Callable[[int], Pixels | None]:
    """A function from the key of a source row to its image (H, W, 3), or to None if there is none.

    Args:
        source: the images or the run that the bank was created from.
    """
    domains = _source_domains(source)

    def find(key: int) -> Pixels | None:
        for domain in domains:
            if key < len(domain):
                return _pixels(domain, key)
            key -= len(domain)
        return None

    return find


def _source_domains(source: Path) -> Sequence[Domain]:
    """The images of a bank's source rows, in the order of their keys."""
    if (source / SPEC).exists():
        return source_parts(Run(source))
    return read_images(source).domains


def _pixels(domain: Domain, row: int) -> Pixels:
    """An image of a domain as it looks, before any transform."""
    image = domain.with_transform(None).take([row])[0]  # (C, H, W) in [0, 1]
    colored: Any = (image.expand(3, -1, -1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    return np.ascontiguousarray(colored.numpy())


def _channels(model: SourceModel) -> int:
    """The number of input channels of the first convolution."""
    for parameter in model.encoder.parameters():
        if parameter.ndim == 4:
            return parameter.shape[1]
    return CHANNELS


def _as_floats(pixels: Pixels, channels: int) -> Tensor:
    """The image as (C, H, W) in [0, 1]; gray if the model takes one channel."""
    image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    if channels == 1:
        return (image * torch.tensor(GRAY)[:, None, None]).sum(0, keepdim=True)
    return image
