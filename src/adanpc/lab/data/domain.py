"""Labeled images: one domain, and a data set of several."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from adanpc.errors import UnavailableError
from adanpc.lab.seeds import seed_of
from adanpc.printable import spelled_out
from adanpc.require import did_you_mean

Transform = Callable[[Tensor], Tensor]


class DataError(UnavailableError):
    """Data that are missing, unreadable, or not laid out as published; the message says where to look."""

    code = "bad-data"


class AbsentError(DataError):
    """A data set of which there is nothing at all."""

    code = "absent-data"


class Images(Protocol):
    """Images that are read when they are needed; ``images[i]`` is (C, H, W), uint8, or float in [0, 1].

    A tensor (n, C, H, W) has this interface, too.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


class View:
    """Some of the images, in a given order; nothing is read or copied."""

    def __init__(self, images: Images, rows: Tensor) -> None:
        self.images = images
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[int(self.rows[index])]


class Joined:
    """The images of several collections, one after another; nothing is read or copied."""

    def __init__(self, parts: Sequence[Images]) -> None:
        self.parts = parts
        self.ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Tensor:
        part, row = self.locate(index)
        return self.parts[part][row]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the number of the collection that an image is in, and its row there."""
        index = range(len(self))[index]  # a negative index counts from the end, and one out of range raises IndexError
        part = bisect_right(self.ends, index)
        start = self.ends[part - 1] if part > 0 else 0
        return part, index - start


@dataclass(frozen=True, eq=False)
class Domain:
    """Images with labels (n,) int64, all drawn under one condition.

    Args:
        name: the name of the condition, such as an angle, a style or a camera.
        images: a tensor (n, C, H, W), or ``Images`` that are read when they are needed.
        labels: (n,) int64.
        transform: turns one image (C, H, W), or a batch of images of equal size, into inputs of a model.
        version: a text that changes when images on disk do, made of names, sizes and times. A tensor needs none.
    """

    name: str
    images: Tensor | Images
    labels: Tensor
    transform: Transform | None = None
    version: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor | Sequence[int]) -> Tensor:
        """Returns the images (B, C, H, W) at these rows, transformed; bytes become floats in [0, 1]."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        if isinstance(self.images, Tensor):
            return self._prepare(self.images[rows])
        # One by one, since images on disk may have different sizes before the transform.
        prepared = (self._prepare(self.images[row]) for row in rows.tolist())
        return _stack(prepared, len(rows))

    def _prepare(self, images: Tensor) -> Tensor:
        """Returns the inputs of a model for one image or a batch."""
        if images.dtype == torch.uint8:
            images = images.float() / 255
        if self.transform is not None:
            images = self.transform(images)
        return images

    def subset(self, rows: Tensor | Sequence[int]) -> Domain:
        """Returns the domain with only these rows, in this order; images on disk are not read."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        version = f"{self.version} {_hash(rows)}"
        images = self.images[rows] if isinstance(self.images, Tensor) else View(self.images, rows)
        return replace(self, images=images, labels=self.labels[rows], version=version)

    def with_transform(self, transform: Transform | None) -> Domain:
        """Returns the same domain with another transform."""
        return replace(self, transform=transform)

    def digest(self) -> str:
        """Returns a hash that changes when the images, the labels or the transform do."""
        # Images on disk are not read for this: their version stands for them.
        content = _hash(self.images) if isinstance(self.images, Tensor) else self.version
        text = f"{self.name} {content} {_hash(self.labels)} {self.transform!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class DataSet:
    """Domains that share their classes.

    Args:
        name: the name in the registry of readers.
        domains: in the published order.
        classes: the names of labels 0, 1, …
        notice: one sentence that a user should know about this copy of the data, or nothing.
    """

    name: str
    domains: tuple[Domain, ...]
    classes: tuple[str, ...]
    notice: str = ""

    def __getitem__(self, name: str) -> Domain:
        for domain in self.domains:
            if domain.name == name:
                return domain
        names = [domain.name for domain in self.domains]
        available = ", ".join(spelled_out(name) for name in names)
        raise DataError(f"{self.name} has no domain {name!r}; it has: {available}{did_you_mean(name, names)}")

    def labeled_as(self, classes: Sequence[str]) -> DataSet:
        """Returns the same images with labels that count in another list of classes, matched by name.

        Args:
            classes: the names of the new labels 0, 1, …, which include all classes of this data set.
        """
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            known = ", ".join(spelled_out(name) for name in classes[:20])
            raise DataError(f"the class {unknown[0]!r} is not one of those that the model knows: {known}")
        numbers = torch.tensor([list(classes).index(name) for name in self.classes])
        domains = tuple(replace(domain, labels=numbers[domain.labels]) for domain in self.domains)
        return replace(self, domains=domains, classes=tuple(classes))

    def digest(self) -> str:
        """Returns a hash that changes when any domain does."""
        digests = " ".join(domain.digest() for domain in self.domains)
        return hashlib.sha256(digests.encode()).hexdigest()[:16]


def join(name: str, domains: Sequence[Domain]) -> Domain:
    """Returns all samples of some domains as one, with the transform of the first; images on disk are not read."""
    images: Tensor | Images = Joined([domain.images for domain in domains])
    tensors = [domain.images for domain in domains if isinstance(domain.images, Tensor)]
    if len(tensors) == len(domains):
        images = torch.cat(tensors)
    labels = torch.cat([domain.labels for domain in domains])
    version = " ".join(domain.digest() for domain in domains)
    return Domain(name, images, labels, domains[0].transform, version)


def split(domain: Domain, seed: int, share: float = 0.8) -> tuple[Domain, Domain]:
    """Returns two random parts of a domain: ``share`` of it (rounded down), and the rest.

    The parts depend on the seed and the name of the domain, so that domains of equal size are split independently.
    """
    if not 0 < share < 1:
        raise DataError(f"share must be between 0 and 1, got {share}")
    order = _shuffle(len(domain), seed_of(seed, domain.name))
    first = int(len(domain) * share)
    return domain.subset(order[:first]), domain.subset(order[first:])


def some(domain: Domain, count: int | None, seed: int) -> Domain:
    """Returns at most ``count`` random samples of a domain, in their original order; all of them if count is None."""
    if count is None or count >= len(domain):
        return domain
    order = _shuffle(len(domain), seed_of(seed, "some", domain.name))
    return domain.subset(order[:count].sort().values)


def _shuffle(count: int, seed: int) -> Tensor:
    """Returns the numbers below ``count`` in random order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _stack(images: Iterable[Tensor], count: int) -> Tensor:
    """Returns one tensor (B, C, H, W) of images of equal shape.

    It is filled image by image: collecting all of them in a list first would take twice the memory, in small pieces.
    """
    batch: Tensor | None = None  # the shape is that of the first image, which is not known before
    for place, image in enumerate(images):
        if batch is None:
            batch = image.new_empty(count, *image.shape)
        if image.shape != batch.shape[1:]:
            shapes = f"{tuple(batch.shape[1:])} and {tuple(image.shape)}"
            raise DataError(f"images of one batch have the shapes {shapes}: give a transform that makes them equal")
        batch[place] = image
    return torch.zeros(0) if batch is None else batch


def _hash(values: Tensor) -> str:
    """Returns a hash of the bytes of a tensor."""
    contents = values.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(contents).hexdigest()[:16]
