"""A few sure features of the stream are kept for each class, and added to the answers of prototypes: TDA and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import log, log2
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc import require
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.augment import crop, flip
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.zero_shot import ZeroShot

FIRST_ROOM = 64  # rows of a new cache, which doubles when it is full


class Cache:
    """Rows by class, each with the entropy of its prediction: of each class, those of lowest entropy.

    Of equal entropies the earlier row stays.

    Args:
        width: of the rows.
        classes: how many there are.
        keep: how many rows a class may have.
    """

    def __init__(self, width: int, classes: int, keep: int) -> None:
        self.keep = require.whole("keep", keep, least=1)
        self.width = width
        self.classes = classes
        self.room = torch.zeros(0, width)  # (n or more, width)
        self.labels: list[int] = []  # of the rows
        self.entropies: list[float] = []
        self.places: list[list[int]] = [[] for _ in range(classes)]  # of each class, in the order of arrival

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def rows(self) -> Tensor:
        """All rows (n, width), those of a class not side by side."""
        return self.room[: len(self)]

    def add(self, row: Tensor, label: int, height: float) -> None:
        """Offers a row (width,) with its class and entropy; it may displace the one of highest entropy of its class."""
        places = self.places[label]
        if len(places) < self.keep:
            self._make_room(row)
            places.append(len(self))
            self.labels.append(label)
            self.entropies.append(height)
        else:
            highest = max(self.entropies[place] for place in places)
            if height >= highest:
                return
            # Of equally high ones the latest goes; the new row is the latest from now on.
            place = next(place for place in reversed(places) if self.entropies[place] == highest)
            places.remove(place)
            places.append(place)
            self.entropies[place] = height
        self.room[places[-1]] = row

    def counts(self) -> Tensor:
        """Returns how many rows each class has (C,)."""
        return torch.tensor([len(places) for places in self.places], device=self.room.device)

    def _make_room(self, like: Tensor) -> None:
        """Doubles the room if it is full; it takes the dtype and the device of the first row."""
        if len(self) < len(self.room):
            return
        room = like.new_zeros(max(FIRST_ROOM, 2 * len(self.room)), self.width)
        room[: len(self)] = self.rows
        self.room = room

    def state(self) -> dict[str, Any]:
        """Returns all that ``load`` needs, copied."""
        places = [list(each) for each in self.places]
        return {
            "rows": self.rows.clone(),
            "labels": list(self.labels),
            "entropies": list(self.entropies),
            "places": places,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``state`` returned."""
        self.room = state["rows"].clone()
        self.labels = list(state["labels"])
        self.entropies = list(state["entropies"])
        self.places = [list(each) for each in state["places"]]


class TDA(ZeroShot):
    """Adds to the answers of prototypes what sure features of the stream say, and subtracts what unsure ones deny.

    A positive cache keeps the 3 features of lowest entropy that were answered as each class. A negative cache keeps 2
    of those whose entropy is between 0.2 and 0.5 of the largest; each denies the classes whose probability was above
    0.03. The logits of a query get ``2 exp(-5 (1 - cosine))`` for the class of each positive feature, and lose
    ``0.117 exp(-(1 - cosine))`` for each class that a negative feature denies. A query enters the caches before it is
    answered, one query after another, whatever the batch size.

    Paper:
        Karmanov et al., Efficient Test-Time Adaptation of Vision-Language Models, CVPR 2024.

    Differs from the published code:
        The entropy is divided by its largest value ln C; see ``TDAPublished``. One setting, that for ImageNet, is used
        for all data; there, weight and sharpness were searched for each data set on its test images.

    Args:
        prototypes: see ``ZeroShot``.
        weight: of the positive cache.
        sharpness: how fast the weight of its features falls with their distance.
    """

    # What was searched for single data sets, from the smallest to the largest.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"weight": (1.0, 2.0, 4.0), "sharpness": (5.0, 7.0, 8.0)}

    def __init__(
        self, source: Source, *, prototypes: str = "head", weight: float = 2.0, sharpness: float = 5.0
    ) -> None:
        super().__init__(source, prototypes=prototypes)
        require.positive("weight", weight)
        require.positive("sharpness", sharpness)
        classes = self.model.classes
        self.weight = weight
        self.sharpness = sharpness
        self.positive = Cache(self.model.dim, classes, keep=3)
        # A row is a feature, followed by a 1 for each class that it denies.
        self.negative = Cache(self.model.dim + classes, classes, keep=2)
        self.largest_entropy = log(classes)

    def extra(self) -> dict[str, Any]:
        """Returns both caches."""
        return {"positive": self.positive.state(), "negative": self.negative.state()}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts both caches back."""
        self.positive.load(extra["positive"])
        self.negative.load(extra["negative"])

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D), each after it entered the caches."""
        rows, logits = self.look(batch)
        heights = entropy(logits).tolist()
        answers = []
        for row, own_logits, height in zip(rows, logits, heights, strict=True):
            self.keep(row, own_logits, height)
            answers.append(own_logits + self.affirmed(row, self.positive) - self.denied(row))
        return torch.stack(answers).softmax(1)

    def keep(self, row: Tensor, logits: Tensor, height: float) -> None:
        """Offers a unit row (D,) with its logits (C,) and their entropy to both caches."""
        label = int(logits.argmax())
        self.positive.add(row, label, height)
        if 0.2 < height / self.largest_entropy < 0.5:
            probs = logits.softmax(0)
            denies = (probs > 0.03) & (probs < 1)
            self.negative.add(torch.cat([row, denies.to(row)]), label, height)

    def affirmed(self, row: Tensor, cache: Cache) -> Tensor:
        """Returns what the features of a positive cache add to the logits (C,) of a unit row (D,)."""
        weights = (-self.sharpness * (1 - cache.rows @ row)).exp()
        labels = torch.tensor(cache.labels, device=row.device)
        return self.weight * weights.new_zeros(self.model.classes).index_add(0, labels, weights)

    def denied(self, row: Tensor) -> Tensor:
        """Returns what the features of the negative cache take from the logits (C,) of a unit row (D,)."""
        if len(self.negative) == 0:
            return torch.zeros_like(row[:1])
        features, denies = self.negative.rows.split([self.model.dim, self.model.classes], 1)
        weights: Tensor = (features @ row - 1).exp()
        taken: Tensor = 0.117 * weights @ denies
        return taken


class TDAPublished(TDA):
    """Does what TDA does with the entropies of its public code: nats, divided by the logarithm of C to base 2.

    So a feature enters the negative cache if its entropy is between 0.29 and 0.72 of the largest, where the text says
    0.2 and 0.5.

    Paper:
        Karmanov et al. 2024: see ``TDA``.
    """

    def __init__(
        self, source: Source, *, prototypes: str = "head", weight: float = 2.0, sharpness: float = 5.0
    ) -> None:
        super().__init__(source, prototypes=prototypes, weight=weight, sharpness=sharpness)
        self.largest_entropy = log2(self.model.classes)


class BoostAdapter(TDA):
    """Does what TDA does, with the surest views of the image itself in the positive cache while it is answered.

    Of 64 views of an image, which are the image and random parts of it, the tenth with the lowest entropies is offered
    to a copy of the positive cache, which may keep one feature more of each class and which is forgotten after the
    answer.

    Paper:
        Zhang et al., BoostAdapter: Improving Vision-Language Test-Time Adaptation via Regional Bootstrapping, NeurIPS
        2024.

    Differs from the published code:
        The room for views is one setting for all data, there between 0 and 3 for each data set. The image itself is
        looked up, as there for corrupted images and small data sets; for others there, the mean of the surest views.
        The negative cache keeps features of low entropy, as in TDA; there the latest ones.
        Views are made of inputs, after their own crop and normalization.

    Args:
        prototypes, weight, sharpness: see ``TDA``.
        views: how many, with the image itself.
        room: how many more features of each class the copy may keep.
        mirror: whether views may be mirrored; switch it off where left and right decide the class, as in digits.
    """

    sees: ClassVar[Literal["images", "features"]] = "images"
    passes: ClassVar[int] = 64

    def __init__(
        self,
        source: Source,
        *,
        prototypes: str = "head",
        weight: float = 2.0,
        sharpness: float = 5.0,
        views: int = 64,
        room: int = 1,
        mirror: bool = True,
    ) -> None:
        super().__init__(source, prototypes=prototypes, weight=weight, sharpness=sharpness)
        self.views = require.whole("views", views, least=1)
        self.room = require.whole("room", room, least=0)
        self.mirror = mirror

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of images (B, …), each after it entered the caches."""
        return torch.cat([self._answer(image) for image in batch.split(1)])

    def _answer(self, image: Tensor) -> Tensor:
        """Returns the probabilities (1, C) of an image (1, …)."""
        rows, logits = self.look(self.model.features(self._views(image)))
        heights = entropy(logits)
        self.keep(rows[0], logits[0], float(heights[0]))
        cache = deepcopy(self.positive)
        cache.keep += self.room
        for place in heights.argsort()[: len(rows) // 10].tolist():
            cache.add(rows[place], int(logits[place].argmax()), float(heights[place]))
        answer = logits[0] + self.affirmed(rows[0], cache) - self.denied(rows[0])
        return answer.softmax(0)[None]

    def _views(self, image: Tensor) -> Tensor:
        """Returns an image (1, …) and random parts of it."""
        parts = crop(image.expand(self.views - 1, *image.shape[1:]))
        if self.mirror:
            parts = flip(parts)
        return torch.cat([image, parts])


class DMN(ZeroShot):
    """Adds to the answers of prototypes those of prototypes that are made of the stream, for each query anew.

    The 50 features of lowest entropy that were answered as each class are kept. For a query, each class is the sum of
    its kept features and its own direction, each weighted by ``exp(-5.5 (1 - cosine))``, scaled to length 1; the answer
    is the mean of those by both kinds of prototypes. A query is kept before it is answered, one after another, whatever
    the batch size.

    Paper:
        Zhang et al., Dual Memory Networks: A Versatile Adaptation Approach for Vision-Language Models, CVPR 2024, its
        training-free version (DMN-ZS).

    Differs from the published code:
        Both answers weigh the same; there the best of 13 weights on the test images is reported. Without views of
        the query.

    Args:
        prototypes: see ``ZeroShot``.
        keep: how many features of each class.
        sharpness: how fast the weight of a feature falls with its distance.
    """

    def __init__(self, source: Source, *, prototypes: str = "head", keep: int = 50, sharpness: float = 5.5) -> None:
        super().__init__(source, prototypes=prototypes)
        require.positive("sharpness", sharpness)
        self.sharpness = sharpness
        self.kept = Cache(self.model.dim, self.model.classes, keep)

    def extra(self) -> dict[str, Any]:
        """Returns the features that are kept."""
        return {"kept": self.kept.state()}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts back the features that were kept."""
        self.kept.load(extra["kept"])

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D), each after it was kept."""
        rows, logits = self.look(batch)
        labels = logits.argmax(1).tolist()
        heights = entropy(logits).tolist()
        answers = []
        for row, own_logits, label, height in zip(rows, logits, labels, heights, strict=True):
            self.kept.add(row, label, height)
            answers.append((own_logits.softmax(0) + self._by_stream(row)) / 2)
        return torch.stack(answers)

    def _by_stream(self, row: Tensor) -> Tensor:
        """Returns the probabilities (C,) of a unit row (D,) by prototypes made for it."""
        kept = self.kept.rows
        own_weights = (-self.sharpness * (1 - self.directions @ row)).exp()  # (C,)
        weights = (-self.sharpness * (1 - kept @ row)).exp()  # (n,)
        labels = torch.tensor(self.kept.labels, device=row.device)
        sums = own_weights[:, None] * self.directions
        sums.index_add_(0, labels, weights[:, None] * kept)
        logits = 100 * normalize(sums, dim=1) @ row
        return logits.softmax(0)
