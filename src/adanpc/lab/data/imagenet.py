"""ImageNet and ImageNet-C in their published folders."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn.functional import interpolate

from adanpc.lab.data.corrupted import CONDITIONS, MADE, corrupted, part_of, title
from adanpc.lab.data.domain import DataError, DataSet, Images
from adanpc.lab.data.images import MOST_PIXELS, file_behind
from adanpc.lab.data.scan import (
    build_data_set,
    candidate_folders,
    join_clauses,
    list_folder,
    scan_folder,
    size_difference,
)
from adanpc.progress import track

FOLDERS = ("ImageNet", "imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC")
FOLDERS_C = ("ImageNet-C", "imagenet-c", "ImageNetC")
GROUPS = ("", "noise/", "blur/", "weather/", "digital/", "extra/")
PUBLISHED = {"train": 1_281_167, "val": 50_000}  # how many images were published
CLASSES = 1_000
IMAGENET_NAME = re.compile(r"n\d{8}|ILSVRC2012_")  # a class, or an image that is not yet in the folder of a class
RESIZED = 256  # the shorter side before the center is cropped
CROP = 224


def imagenet(root: Path, domains: tuple[str, ...] = ("train", "val")) -> DataSet | None:
    """Returns ImageNet with the domains train and val, as far as they exist; None if neither does.

    The classes are the sorted WordNet ids. If all 1,000 exist, labels are those of the usual pretrained networks.

    Args:
        root: the folder of ImageNet, or one above.
        domains: the domains to look for.
    """
    for place in candidate_folders(root, FOLDERS):
        found = [domain for domain in domains if _is_imagenet(place / domain)]
        if found:
            scans = {domain: scan_folder(place, domain) for domain in track(found, "listing ImageNet")}
            data = build_data_set("imagenet", scans)
            clauses = []
            for domain in data.domains:
                clauses.append(size_difference(f"{domain.name} images", len(domain), PUBLISHED[domain.name]))
            return _add_notice(data, *clauses)
    return None


def imagenet_c(root: Path, seed: int) -> DataSet | None:
    """Returns ImageNet-C with a domain for each corruption and severity, the fifteen standard corruptions first.

    The folders may be in the published groups (noise, blur, …) or side by side. Without them, images are generated from
    ImageNet's val when they are needed, and the notice says so. Returns None if val is missing, too.
    """
    for place in candidate_folders(root, FOLDERS_C):
        folders = _condition_folders(place)
        if folders:
            scans = {}
            for (corruption, severity), folder in track(folders.items(), "listing ImageNet-C"):
                scans[title(corruption, severity)] = scan_folder(place, folder)
            return _add_notice(build_data_set("imagenet-c", scans), part_of(folders))
    clean = imagenet(root, ("val",))
    if clean is None:
        return None
    cropped = replace(clean["val"], images=Cropped(clean["val"].images))
    notice = join_clauses(MADE, clean.notice)
    return replace(clean, name="imagenet-c", domains=corrupted(cropped, seed), notice=notice)


class Cropped:
    """Images (3, 224, 224) uint8, cropped as in ImageNet-C: the shorter side is resized to 256, then the center taken.

    Args:
        images: uint8, of any size.
    """

    def __init__(self, images: Tensor | Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image = self.images[index]
        height, width = image.shape[1:]
        shorter = min(height, width)
        height = RESIZED * height // shorter
        width = RESIZED * width // shorter
        if height * width > MOST_PIXELS:  # the longer side may have become enormous
            raise DataError(self._too_narrow(index, image))
        resized = interpolate(image[None], [height, width], mode="bilinear", antialias=True)[0]
        top = round((height - CROP) / 2)
        left = round((width - CROP) / 2)
        return resized[:, top : top + CROP, left : left + CROP]

    def _too_narrow(self, index: int, image: Tensor) -> str:
        """Returns a message about an image that would need gigabytes once resized, such as one of 1 x 60,000 pixels."""
        file = file_behind(self.images, index)
        name = f"image {index}" if file is None else repr(file.files.file(file.row))
        sides = f"{image.shape[1]} x {image.shape[2]}"
        return f"{name} has {sides} pixels, too narrow to be cut as ImageNet-C was: drop it by adanpc.lab.data.without"


def _is_imagenet(folder: Path) -> bool:
    """Returns whether this folder has a class or an image that is named as in ImageNet."""
    if not folder.is_dir():
        return False
    return any(IMAGENET_NAME.match(entry.name) for entry in list_folder(folder))


def _condition_folders(place: Path) -> dict[tuple[str, int], str]:
    """Returns the folder of each corruption and severity that exists."""
    folders = {}
    for corruption, severity in CONDITIONS:
        for group in GROUPS:
            folder = f"{group}{corruption}/{severity}"
            if (place / folder).is_dir():
                folders[corruption, severity] = folder
                break
    return folders


def _add_notice(data: DataSet, *clauses: str) -> DataSet:
    """Returns the data set with these clauses, and one about missing classes, in its notice."""
    classes = size_difference("classes", len(data.classes), CLASSES)
    return replace(data, notice=join_clauses(data.notice, *clauses, classes))
