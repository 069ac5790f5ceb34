"""Memories that keep a few images of the stream, balanced by class, in whatever order the stream arrives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adanpc import require


@dataclass
class Exemplar:
    """An image of the stream, with what the model predicted when it arrived.

    Args:
        image: (C, H, W), or whatever shape an input of the model has.
        label: the predicted class.
        uncertainty: the entropy of the prediction.
        age: how many images have arrived since.
    """

    image: Tensor
    label: int
    uncertainty: float
    age: int = 0


class Exemplars(ABC):
    """At most ``capacity`` images, balanced by predicted class.

    Args:
        capacity: the largest number of images.
        classes: the number of classes.
    """

    def __init__(self, capacity: int, classes: int) -> None:
        self.capacity = require.whole("capacity", capacity, least=1)
        self.classes = classes
        self.kept: list[Exemplar] = []

    @abstractmethod
    def add(self, new: Exemplar) -> None:
        """Offers the next image of the stream; if it is kept, another image may be dropped for it."""

    def images(self) -> Tensor:
        """Returns all images (n, …), the one kept for the longest time first."""
        return torch.stack([exemplar.image for exemplar in self.kept])

    def held(self) -> list[int]:
        """Returns the number of images of each class."""
        counts = [0] * self.classes
        for exemplar in self.kept:
            counts[exemplar.label] += 1
        return counts

    def largest(self) -> list[int]:
        """Returns the classes that have the most images."""
        counts = self.held()
        most = max(counts)
        return [label for label, count in enumerate(counts) if count == most]

    def state(self) -> dict[str, Any]:
        """Returns all that ``load`` needs, as plain values."""
        return {
            "image": [exemplar.image for exemplar in self.kept],
            "label": [exemplar.label for exemplar in self.kept],
            "uncertainty": [exemplar.uncertainty for exemplar in self.kept],
            "age": [exemplar.age for exemplar in self.kept],
        }

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Puts back what ``state`` returned."""
        self.kept = []
        columns = (state["image"], state["label"], state["uncertainty"], state["age"])
        for image, label, uncertainty, age in zip(*columns, strict=True):
            self.kept.append(Exemplar(image.to(device), label, uncertainty, age))


class BalancedReservoir(Exemplars):
    """Prediction-balanced reservoir: the same number of images of each class, each class sampled uniformly over time.

    When the memory is full, an image of a class that is not among the largest displaces a random image of a largest
    class. An image of a largest class displaces a random one of its own class, with the probability that keeps the
    sample uniform.

    Args:
        capacity: the largest number of images.
        classes: the number of classes.
    """

    def __init__(self, capacity: int, classes: int) -> None:
        super().__init__(capacity, classes)
        self.seen = [0] * classes  # images of each predicted class in the stream so far

    def add(self, new: Exemplar) -> None:
        """Offers the next image of the stream; if it is kept, another image may be dropped for it."""
        self.seen[new.label] += 1
        if len(self.kept) == self.capacity:
            largest = self.largest()
            if new.label not in largest:
                self._drop_one_of(largest[_draw(len(largest))])
            else:
                # Reservoir sampling: each of the images seen so far is kept with the same probability.
                chance = self.held()[new.label] / self.seen[new.label]
                if float(torch.rand(())) >= chance:
                    return
                self._drop_one_of(new.label)
        self.kept.append(new)

    def _drop_one_of(self, label: int) -> None:
        """Drops a random image of this class."""
        places = [place for place, exemplar in enumerate(self.kept) if exemplar.label == label]
        del self.kept[places[_draw(len(places))]]

    def state(self) -> dict[str, Any]:
        """Returns all that ``load`` needs, as plain values."""
        return {**super().state(), "seen": list(self.seen)}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Puts back what ``state`` returned."""
        super().load(state, device)
        self.seen = list(state["seen"])


class TimelyMemory(Exemplars):
    """Category-balanced sampling with timeliness and uncertainty (CSTU): recent, certain images, balanced by class.

    Each class has room for capacity / classes images. If the class of a new image is full, the new one competes with
    the images of its own class; if the memory is full, with those of the largest classes. The one with the highest
    ``score`` is dropped, which may be the new one.

    Args:
        capacity: the largest number of images.
        classes: the number of classes, at least 2.
        timeliness: how much age counts.
        uncertainty: how much entropy counts.
    """

    def __init__(self, capacity: int, classes: int, timeliness: float = 1.0, uncertainty: float = 1.0) -> None:
        super().__init__(capacity, classes)
        self.timeliness = timeliness
        self.uncertainty = uncertainty

    def add(self, new: Exemplar) -> None:
        """Offers the next image of the stream, which may displace another; the age of all kept images grows by one."""
        if self._make_room(new):
            self.kept.append(new)
        for exemplar in self.kept:
            exemplar.age += 1

    def score(self, exemplar: Exemplar) -> float:
        """Returns how dispensable an image is: the older and the less certain, the higher the score."""
        age = 1 / (1 + math.exp(-exemplar.age / self.capacity))
        largest_entropy = math.log(self.classes)
        return self.timeliness * age + self.uncertainty * exemplar.uncertainty / largest_entropy

    def _make_room(self, new: Exemplar) -> bool:
        """Drops an image for the new one if necessary; returns whether there is room for the new one."""
        class_is_full = self.held()[new.label] >= self.capacity / self.classes
        memory_is_full = len(self.kept) >= self.capacity
        if class_is_full:
            labels = [new.label]
        elif memory_is_full:
            labels = self.largest()
        else:
            return True
        rivals = []
        for place, exemplar in enumerate(self.kept):
            if exemplar.label in labels:
                rivals.append((self.score(exemplar), exemplar.label, place))
        highest, _, place = max(rivals)  # of several images with the highest score, the last one of the highest class
        if highest <= self.score(new):
            return False
        del self.kept[place]
        return True


def _draw(count: int) -> int:
    """Returns a random whole number below ``count``."""
    return int(torch.randint(count, ()))
