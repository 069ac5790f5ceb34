"""Images kept from a stream: few, and of all classes, however the stream is ordered."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adanpc.errors import AdaNPCError


@dataclass
class Exemplar:
    """An image of the stream, and what was thought of it when it came.

    Args:
        image: (C, H, W), or whatever a row of the stream is.
        label: the predicted class.
        uncertainty: the entropy of the prediction.
        age: how many images came after it.
    """

    image: Tensor
    label: int
    uncertainty: float
    age: int = 0


class Exemplars(ABC):
    """At most ``capacity`` images, balanced by predicted class.

    Args:
        capacity: how many.
        classes: how many there are.
    """

    def __init__(self, capacity: int, classes: int) -> None:
        if capacity < 1:
            raise AdaNPCError(f"capacity must be at least 1, got {capacity}")
        self.capacity, self.classes = capacity, classes
        self.kept: list[Exemplar] = []

    @abstractmethod
    def add(self, new: Exemplar) -> None:
        """Takes the next image of the stream, or not, and may drop another for it."""

    def images(self) -> Tensor:
        """All images (n, …), the longest kept first."""
        return torch.stack([one.image for one in self.kept])

    def held(self) -> list[int]:
        """How many there are of each class."""
        labels = [one.label for one in self.kept]
        return [labels.count(label) for label in range(self.classes)]

    def largest(self) -> list[int]:
        """The classes of which most are kept."""
        held = self.held()
        return [label for label in range(self.classes) if held[label] == max(held)]

    def state(self) -> dict[str, Any]:
        """All that ``load`` needs, as plain values."""
        columns = ("image", "label", "uncertainty", "age")
        return {column: [getattr(one, column) for one in self.kept] for column in columns}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Puts back what ``state`` gave."""
        columns = (state["image"], state["label"], state["uncertainty"], state["age"])
        self.kept = [Exemplar(image.to(device), *rest) for image, *rest in zip(*columns, strict=True)]


class BalancedReservoir(Exemplars):
    """Prediction-balanced reservoir: equally many of each class, and of each class a uniform sample in time.

    When it is full, an image of a class that is not among the largest drops a random one of the largest; an image of a
    largest class replaces a random one of its own, with the probability that keeps the sample uniform.

    Args:
        capacity: how many.
        classes: how many there are.
    """

    def __init__(self, capacity: int, classes: int) -> None:
        super().__init__(capacity, classes)
        self.seen = [0] * classes  # images of each class that came

    def add(self, new: Exemplar) -> None:
        """Takes the next image of the stream, or not, and may drop another for it."""
        self.seen[new.label] += 1
        if len(self.kept) == self.capacity:
            largest = self.largest()
            if new.label not in largest:
                self._drop(largest[_draw(len(largest))])
            elif float(torch.rand(())) < self.held()[new.label] / self.seen[new.label]:
                self._drop(new.label)
            else:
                return
        self.kept.append(new)

    def _drop(self, label: int) -> None:
        places = [place for place, one in enumerate(self.kept) if one.label == label]
        del self.kept[places[_draw(len(places))]]

    def state(self) -> dict[str, Any]:
        """All that ``load`` needs, as plain values."""
        return {**super().state(), "seen": list(self.seen)}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Puts back what ``state`` gave."""
        super().load(state, device)
        self.seen = list(state["seen"])


class TimelyMemory(Exemplars):
    """Category-balanced sampling with timeliness and uncertainty (CSTU): recent, certain images, balanced by class.

    A class may have capacity / classes images. A new image must drop one if its class has its share, then of its own
    class, or if the memory is full, then of the largest classes: that with the highest ``score``, unless the new one's
    is as high.

    Args:
        capacity: how many.
        classes: how many there are, at least 2.
        timeliness: how much age counts.
        uncertainty: how much entropy counts.
    """

    def __init__(self, capacity: int, classes: int, timeliness: float = 1.0, uncertainty: float = 1.0) -> None:
        super().__init__(capacity, classes)
        self.timeliness, self.uncertainty = timeliness, uncertainty

    def add(self, new: Exemplar) -> None:
        """Takes the next image of the stream, or not, and may drop another for it; all grow older by one."""
        if self._makes_room(new):
            self.kept.append(new)
        for one in self.kept:
            one.age += 1

    def score(self, one: Exemplar) -> float:
        """How dispensable an image is: the older and the less certain, the more."""
        age = 1 / (1 + math.exp(-one.age / self.capacity))
        return self.timeliness * age + self.uncertainty * one.uncertainty / math.log(self.classes)

    def _makes_room(self, new: Exemplar) -> bool:
        share_is_full = self.held()[new.label] >= self.capacity / self.classes
        if not share_is_full and len(self.kept) < self.capacity:
            return True
        labels = [new.label] if share_is_full else self.largest()
        rivals = [(self.score(one), one.label, place) for place, one in enumerate(self.kept) if one.label in labels]
        score, _, place = max(rivals)  # of equal scores the last of the highest class
        if score <= self.score(new):
            return False
        del self.kept[place]
        return True


def _draw(count: int) -> int:
    """A random whole number below count."""
    return int(torch.randint(count, ()))
