"""ImageNet and ImageNet-C in their published folders."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn.functional import interpolate

from adanpc.lab.data.corrupted import CONDITIONS, MADE, corrupted, part_of, title
from adanpc.lab.data.domain import DataSet, Images
from adanpc.lab.data.scan import assemble, compared, notice, places, scan
from adanpc.progress import track

FOLDERS = ("ImageNet", "imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC")
FOLDERS_C = ("ImageNet-C", "imagenet-c", "ImageNetC")
GROUPS = ("", "noise/", "blur/", "weather/", "digital/", "extra/")
PUBLISHED = {"train": 1_281_167, "val": 50_000}
CLASSES = 1_000
OF_IMAGENET = re.compile(r"n\d{8}|ILSVRC2012_")  # a class, or an image that is in none yet
SHORTER, SIDE = 256, 224


def imagenet(root: Path, parts: tuple[str, ...] = ("train", "val")) -> DataSet | None:
    """ImageNet with those of the domains train and val that are there; None if neither is.

    The classes are the sorted WordNet ids: the labels of the usual pretrained networks, if all 1,000 are there.

    Args:
        root: the folder of ImageNet, or one above.
        parts: the domains to look for.
    """
    for place in places(root, FOLDERS):
        if names := [name for name in parts if _of_imagenet(place / name)]:
            data = assemble("imagenet", {name: scan(place, name) for name in track(names, "listing ImageNet")})
            counts = [compared(f"{domain.name} images", len(domain), PUBLISHED[domain.name]) for domain in data.domains]
            return _noted(data, *counts)
    return None


def imagenet_c(root: Path, seed: int) -> DataSet | None:
    """ImageNet-C with a domain for each corruption and severity, the fifteen standard corruptions first.

    The folders may lie in the groups in which they are published (noise, blur, …) or beside each other. Without them
    the images are made of ImageNet's val, when they are asked for, and the notice says so; None if that is missing too.
    """
    for place in places(root, FOLDERS_C):
        if found := _conditions(place):
            listing = track(found.items(), "listing ImageNet-C")
            data = assemble("imagenet-c", {title(*condition): scan(place, folder) for condition, folder in listing})
            return _noted(data, part_of(found))
    clean = imagenet(root, ("val",))
    if clean is None:
        return None
    cropped = replace(clean["val"], images=Cropped(clean["val"].images))
    return replace(clean, name="imagenet-c", domains=corrupted(cropped, seed), notice=notice(MADE, clean.notice))


class Cropped:
    """Images (3, 224, 224) uint8, cut as ImageNet-C was: the shorter side resized to 256, then the center.

    Args:
        images: uint8, of any size.
    """

    def __init__(self, images: Tensor | Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image = self.images[index]
        shape = [SHORTER * side // min(image.shape[1:]) for side in image.shape[1:]]
        resized = interpolate(image[None], shape, mode="bilinear", antialias=True)[0]
        top, left = (round((side - SIDE) / 2) for side in shape)
        return resized[:, top : top + SIDE, left : left + SIDE]


def _of_imagenet(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(OF_IMAGENET.match(entry.name) for entry in entries)


def _conditions(place: Path) -> dict[tuple[str, int], str]:
    """The folder of each condition that is there."""
    found = {}
    for corruption, severity in CONDITIONS:
        folders = (f"{group}{corruption}/{severity}" for group in GROUPS)
        if there := [folder for folder in folders if (place / folder).is_dir()]:
            found[corruption, severity] = there[0]
    return found


def _noted(data: DataSet, *clauses: str) -> DataSet:
    return replace(data, notice=notice(data.notice, *clauses, compared("classes", len(data.classes), CLASSES)))
