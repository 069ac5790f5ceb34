"""Methods that combine prototypes with a cache of confident features of each class: TDA, BoostAdapter, DMN."""

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

FIRST_ROOM = 64  # rows that a new cache has room for; the room doubles when it is full


class Cache:
    """The rows of lowest entropy of each class, where a row's entropy is that of its prediction.

    Of two rows with equal entropies the earlier one stays.

    Args:
        width: the length of a row.
        classes: the number of classes.
        keep: how many rows a class may have.
    """

    def __init__(self, width: int, classes: int, keep: int) -> None:
        self.keep = require.whole("keep", keep, least=1)
        self.width = width
        self.classes = classes
        self.room = torch.zeros(0, width)  # (n or more, width); only the first n rows are in use
        self.labels: list[int] = []  # the class of each row
        self.entropies: list[float] = []  # the entropy of each row
        self.places: list[list[int]] = [[] for _ in range(classes)]  # the row numbers of each class, by arrival

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def rows(self) -> Tensor:
        """All rows (n, width); rows of the same class are not necessarily next to each other."""
        return self.room[: len(self)]

    def add(self, row: Tensor, label: int, row_entropy: float) -> None:
        """Offers a row (width,) with its class and entropy.

        If its class is full, it displaces the row of highest entropy of the class, unless its own is as high.
        """
        places = self.places[label]
        if len(places) < self.keep:
            self._make_room(row)
            places.append(len(self))
            self.labels.append(label)
            self.entropies.append(row_entropy)
        else:
            place = self._displaced(places, row_entropy)
            if place is None:
                return
            # The new row takes its place in the room, and comes last in the order of arrival.
            places.remove(place)
            places.append(place)
            self.entropies[place] = row_entropy
        self.room[places[-1]] = row

    def _displaced(self, places: Sequence[int], row_entropy: float) -> int | None:
        """Returns which of the rows of a full class a new one displaces; None if the new one is not kept."""
        highest = max(self.entropies[place] for place in places)
        if row_entropy >= highest:
            return None
        # Of several rows with the highest entropy the latest goes.
        return next(place for place in reversed(places) if self.entropies[place] == highest)

    def counts(self) -> Tensor:
        """Returns the number of rows of each class (C,)."""
        return torch.tensor([len(places) for places in self.places], device=self.room.device)

    def _make_room(self, like: Tensor) -> None:
        """Doubles the room if it is full; the new room has the dtype and device of the row ``like``."""
        if len(self) < len(self.room):
            return
        room = like.new_zeros(max(FIRST_ROOM, 2 * len(self.room)), self.width)
        room[: len(self)] = self.rows
        self.room = room

    def state(self) -> dict[str, Any]:
        """Returns copies of all that ``load`` needs."""
        return {
            "rows": self.rows.clone(),
            "labels": list(self.labels),
            "entropies": list(self.entropies),
            "places": [list(class_places) for class_places in self.places],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``state`` returned."""
        self.room = state["rows"].clone()
        self.labels = list(state["labels"])
        self.entropies = list(state["entropies"])
        self.places = [list(class_places) for class_places in state["places"]]


class LatestCache(Cache):
    """The latest rows of each class, whatever their entropy."""

    def _displaced(self, places: Sequence[int], row_entropy: float) -> int | None:
        """Returns the row that arrived first."""
        return places[0]


class TDA(ZeroShot):
    """Corrects the logits of class prototypes with two caches of features from the stream.

    A positive cache keeps, for each class, the 3 features of lowest entropy that were answered with it. A negative
    cache keeps 2 of those whose entropy is between 0.2 and 0.5 of the largest possible one; such a feature speaks
    against the classes whose probability was above 0.03. A query gains ``2 exp(-5 (1 - cosine))`` on the logit of the
    class of each positive feature, and loses ``0.117 exp(-(1 - cosine))`` on the logit of each class that a negative
    feature speaks against. Queries enter the caches one by one, each before it is answered, whatever the batch size.

    Paper:
        Karmanov et al., Efficient Test-Time Adaptation of Vision-Language Models, CVPR 2024.

    Differs from the published code:
        The entropy is divided by its largest value ln C; see ``TDAPublished``. The setting for ImageNet is used for
        all data; the published code searches weight and sharpness for each data set on its test images.

    Args:
        prototypes: see ``ZeroShot``.
        weight: of the positive cache.
        sharpness: how fast the weight of a cached feature falls with its distance from the query.
    """

    # The range of the published values, which were searched for each data set.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"weight": (1.0, 2.0, 4.0), "sharpness": (5.0, 7.0, 8.0)}
    negative_kind: ClassVar[type[Cache]] = Cache

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
        # A row is a feature, followed by one number for each class: 1 if the feature speaks against it, else 0.
        self.negative = self.negative_kind(self.model.dim + classes, classes, keep=2)

    def extra(self) -> dict[str, Any]:
        """Returns both caches."""
        return {"positive": self.positive.state(), "negative": self.negative.state()}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts both caches back."""
        self.positive.load(extra["positive"])
        self.negative.load(extra["negative"])

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D); each enters the caches before it is answered."""
        rows, logits = self.rows_and_logits(batch)
        entropies = entropy(logits).tolist()
        answers = []
        for row, own_logits, row_entropy in zip(rows, logits, entropies, strict=True):
            self.keep(row, own_logits, row_entropy)
            answers.append(own_logits + self.positive_logits(row, self.positive) - self.negative_logits(row))
        return torch.stack(answers).softmax(1)

    def largest_entropy(self) -> float:
        """Returns what entropies are divided by to decide whether a feature enters the negative cache."""
        return log(self.model.classes)

    def keep(self, row: Tensor, logits: Tensor, row_entropy: float) -> None:
        """Offers a unit row (D,), given its logits (C,) and their entropy, to both caches."""
        label = int(logits.argmax())
        self.positive.add(row, label, row_entropy)
        relative_entropy = row_entropy / self.largest_entropy()
        if 0.2 < relative_entropy < 0.5:
            probs = logits.softmax(0)
            denies = (probs > 0.03) & (probs < 1)
            self.negative.add(torch.cat([row, denies.to(row)]), label, row_entropy)

    def positive_logits(self, row: Tensor, cache: Cache) -> Tensor:
        """Returns what a positive cache adds to the logits (C,) of a unit row (D,)."""
        weights = (-self.sharpness * (1 - cache.rows @ row)).exp()
        labels = torch.tensor(cache.labels, device=row.device)
        return self.weight * weights.new_zeros(self.model.classes).index_add(0, labels, weights)

    def negative_logits(self, row: Tensor) -> Tensor:
        """Returns what the negative cache subtracts from the logits (C,) of a unit row (D,)."""
        if len(self.negative) == 0:
            return torch.zeros_like(row[:1])  # (1,), which broadcasts
        features, denies = self.negative.rows.split([self.model.dim, self.model.classes], 1)
        weights: Tensor = (features @ row - 1).exp()
        subtracted: Tensor = 0.117 * weights @ denies
        return subtracted


class TDAPublished(TDA):
    """TDA with the entropy of its public code: in nats, but divided by the logarithm of C to base 2.

    So a feature enters the negative cache if its entropy is between 0.29 and 0.72 of the largest, instead of 0.2 and
    0.5 as the paper says.

    Paper:
        Karmanov et al. 2024: see ``TDA``.
    """

    def largest_entropy(self) -> float:
        """Returns the logarithm of the number of classes to base 2."""
        return log2(self.model.classes)


class BoostAdapter(TDA):
    """TDA, with the most confident views of the image itself in the positive cache while it is answered.

    There are 64 views: the image and random crops of it. The tenth of them with the lowest entropies is offered to a
    copy of the positive cache, which may keep one more feature of each class and is discarded after the answer.

    Paper:
        Zhang et al., BoostAdapter: Improving Vision-Language Test-Time Adaptation via Regional Bootstrapping, NeurIPS
        2024.

    Differs from the published code:
        The room for views is the same for all data; in the published code it is between 0 and 3, depending on the
        data set. The query is the image itself, as in the published code for corrupted images and small data sets;
        for others that code uses the mean of the most confident views. The negative cache is that of TDA; see
        ``BoostAdapterPublished``. Views are made from inputs that have already been cropped and normalized.

    Args:
        prototypes, weight, sharpness: see ``TDA``.
        views: how many, including the image itself.
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
        """Returns the probabilities (B, C) of images (B, …); each enters the caches before it is answered."""
        return torch.cat([self._answer(image) for image in batch.split(1)])

    def _answer(self, image: Tensor) -> Tensor:
        """Returns the probabilities (1, C) of an image (1, …)."""
        rows, logits = self.rows_and_logits(self.model.features(self._views(image)))
        entropies = entropy(logits)
        self.keep(rows[0], logits[0], float(entropies[0]))  # the first view is the image itself
        cache = deepcopy(self.positive)
        cache.keep += self.room
        most_confident = entropies.argsort()[: len(rows) // 10]
        for view in most_confident.tolist():
            cache.add(rows[view], int(logits[view].argmax()), float(entropies[view]))
        answer = logits[0] + self.positive_logits(rows[0], cache) - self.negative_logits(rows[0])
        return answer.softmax(0)[None]

    def _views(self, image: Tensor) -> Tensor:
        """Returns an image (1, …), followed by random crops of it."""
        parts = crop(image.expand(self.views - 1, *image.shape[1:]))
        if self.mirror:
            parts = flip(parts)
        return torch.cat([image, parts])


class BoostAdapterPublished(BoostAdapter):
    """BoostAdapter with the negative cache of its public code, which keeps the latest features of each class.

    The entropy that decides what enters it is that of ``TDAPublished``.

    Paper:
        Zhang et al. 2024: see ``BoostAdapter``.

    Differs from the published code:
        In the same ways as BoostAdapter, apart from the negative cache.

    Args:
        prototypes, weight, sharpness, views, room, mirror: see ``BoostAdapter``.
    """

    negative_kind: ClassVar[type[Cache]] = LatestCache

    def largest_entropy(self) -> float:
        """Returns the logarithm of the number of classes to base 2."""
        return log2(self.model.classes)


class DMN(ZeroShot):
    """Averages the answers of fixed prototypes and of prototypes built from the stream for each query.

    For each class, the 50 features of lowest entropy that were answered with it are kept. The prototype of a class for
    a query is the sum of its kept features and its fixed direction, each weighted by ``exp(-5.5 (1 - cosine))``, scaled
    to length 1. Queries are kept one by one, each before it is answered, whatever the batch size.

    Paper:
        Zhang et al., Dual Memory Networks: A Versatile Adaptation Approach for Vision-Language Models, CVPR 2024, its
        training-free version (DMN-ZS).

    Differs from the published code:
        Both answers have the same weight; the published code reports the best of 13 weights on the test images. No
        views of the query are used.

    Args:
        prototypes: see ``ZeroShot``.
        keep: how many features of each class are kept.
        sharpness: how fast the weight of a feature falls with its distance from the query.
    """

    def __init__(self, source: Source, *, prototypes: str = "head", keep: int = 50, sharpness: float = 5.5) -> None:
        super().__init__(source, prototypes=prototypes)
        require.positive("sharpness", sharpness)
        self.sharpness = sharpness
        self.kept = Cache(self.model.dim, self.model.classes, keep)

    def extra(self) -> dict[str, Any]:
        """Returns the kept features."""
        return {"kept": self.kept.state()}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the kept features back."""
        self.kept.load(extra["kept"])

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D); each is kept before it is answered."""
        rows, logits = self.rows_and_logits(batch)
        labels = logits.argmax(1).tolist()
        entropies = entropy(logits).tolist()
        answers = []
        for row, own_logits, label, row_entropy in zip(rows, logits, labels, entropies, strict=True):
            self.kept.add(row, label, row_entropy)
            answers.append((own_logits.softmax(0) + self._by_stream(row)) / 2)
        return torch.stack(answers)

    def _by_stream(self, row: Tensor) -> Tensor:
        """Returns the probabilities (C,) of a unit row (D,) according to prototypes built for it."""
        kept = self.kept.rows
        own_weights = (-self.sharpness * (1 - self.directions @ row)).exp()  # (C,)
        weights = (-self.sharpness * (1 - kept @ row)).exp()  # (n,)
        labels = torch.tensor(self.kept.labels, device=row.device)
        sums = own_weights[:, None] * self.directions
        sums.index_add_(0, labels, weights[:, None] * kept)
        logits = 100 * normalize(sums, dim=1) @ row
        return logits.softmax(0)
