"""Service: a durable bank, and what a process remembers beside it for those who ask and look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from adanpc.core import Change, Prediction
from adanpc.core.guard import Signs
from adanpc.serve.answers import answer_document, names_of, neighbor_documents
from adanpc.serve.encoding import BatchingEncoder, Encoder
from adanpc.serve.errors import MediaTypeError, TooLargeError
from adanpc.serve.events import Events
from adanpc.serve.facts import RowFacts
from adanpc.serve.images import Pixels, decode, small_jpeg
from adanpc.serve.limits import Limits
from adanpc.serve.metrics import Metrics
from adanpc.serve.plane import Plane
from adanpc.serve.queries import Queries, Query
from adanpc.serve.timeline import Timeline
from adanpc.store import DurableBank, Thumbnails

ImageOfKey = Callable[[int], Pixels | None]  # the image of a source row, by the row's key
SEEDED = 2000  # changes that the timeline of a new process begins with
BETWEEN_SIGNS = 1.0  # seconds, at least, between two looks at the signs of the stream


class Service:
    """Answers, changes and memory, for the thread of one event loop. The order of events is decided by the bank alone.

    Args:
        bank: that answers. It is not closed here.
        encoder: images to features (B, D), if images are to be answered.
        thumbnails: keeps small pictures of queries that join, if that is wanted.
        image_of_key: finds the image of a source row.
        limits: of requests.
    """

    def __init__(
        self,
        bank: DurableBank,
        *,
        encoder: Encoder | None = None,
        thumbnails: Thumbnails | None = None,
        image_of_key: ImageOfKey | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.bank = bank
        self.limits = limits or Limits()
        self.thumbnails = thumbnails
        self.image_of_key = image_of_key
        self.queries = Queries()
        self.events = Events(self.limits.listeners)
        self.facts = RowFacts()
        self.plane = Plane()
        self.timeline = Timeline(bank.contents.settings.classes)
        self.encoder = None
        if encoder is not None:
            self.encoder = BatchingEncoder(encoder)
        self.metrics = Metrics(self)
        self._signs: Signs | None = None
        self._signs_time = 0.0
        start = max(bank.log.start, bank.position - SEEDED)
        self.timeline.seed(enumerate(bank.log.read(start), start + 1))

    @property
    def names(self) -> Sequence[str]:
        """The names of the classes."""
        return names_of(self.bank.contents.settings)

    def close(self) -> None:
        """Lets listeners go, and encodes what has arrived."""
        self.events.close()
        if self.encoder is not None:
            self.encoder.close()

    # Asking

    async def encode(self, content: bytes) -> tuple[Tensor, bytes]:
        """The features (1, D) of an image file, and a small picture of it."""
        if self.encoder is None:
            raise MediaTypeError("this service has no encoder for images: send features, or start it with --model")
        pixels, picture = await run_in_threadpool(_decode, content, self.limits.pixels)
        features = await asyncio.wrap_future(self.encoder.submit(pixels))
        return features[None], picture

    async def classify(
        self, features: Tensor, *, request: str = "", pictures: list[bytes | None] | None = None
    ) -> tuple[Prediction, list[Query]]:
        """The answers to queries (B, D), from which the bank learns, and the queries as they are kept."""
        self._check_count(features)
        next_id = self.bank.contents.next_id
        prediction = await asyncio.wrap_future(self.bank.submit(features, request=request))
        joined = [row for row in prediction.joined.tolist() if row >= 0]
        self._remember_joined(prediction, joined, next_id, pictures)
        queries = self._remember(features, prediction, pictures, joined)
        return prediction, queries

    async def predict(
        self, features: Tensor, *, pictures: list[bytes | None] | None = None
    ) -> tuple[Prediction, list[Query]]:
        """The answers to queries (B, D), from which nothing is learned, and the queries as they are kept."""
        self._check_count(features)
        prediction = await run_in_threadpool(self.bank.predict, features)
        queries = self._remember(features, prediction, pictures, [])
        return prediction, queries

    async def preview(self, features: Tensor, without: Iterable[int]) -> Prediction:
        """The answers as they would be without some rows; leaves no trace."""
        return await run_in_threadpool(self.bank.predict, features, without=without)

    def _check_count(self, features: Tensor) -> None:
        if features.ndim == 2 and len(features) > self.limits.queries:
            raise TooLargeError(
                f"a request holds at most {self.limits.queries:,} queries, got {len(features):,}: cut it into several"
            )

    # Changing

    async def apply(self, change: Change) -> int:
        """Carries out an expert's change; the bank's position after it."""
        await run_in_threadpool(self.bank.apply, change)
        return self._changed(type(change).__name__.lower(), len(getattr(change, "ids", ())), change.who)

    async def rollback(self, to: int, *, who: str, why: str) -> int:
        """Returns to an earlier position; the bank's position after it."""
        await run_in_threadpool(self.bank.rollback, to, who=who, why=why)
        return self._changed("rollback", 0, who)

    def _changed(self, kind: str, rows: int, who: str) -> int:
        self.facts.forget()
        position = self.bank.position
        self.metrics.changes.labels(kind).inc()
        self.events.tell("change", {"position": position, "kind": kind, "rows": rows, "who": who})
        return position

    # Showing

    def document(self, query: Query, *, with_neighbors: bool = True) -> dict[str, Any]:
        """A kept query with its answer."""
        document = self.answer(query.prediction, query.place, with_neighbors=with_neighbors)
        picture = None
        if query.picture is not None:
            picture = f"/v1/queries/{query.name}/picture"
        return {"query": query.name, "time": query.time, "picture": picture, **document}

    def answer(self, prediction: Prediction, place: int, *, with_neighbors: bool = True) -> dict[str, Any]:
        """The answer to one query of a prediction."""
        document = answer_document(prediction, place, self.names)
        if with_neighbors:
            neighbors = neighbor_documents(prediction, place, self.bank.contents, self.facts)
            for neighbor in neighbors:
                neighbor["picture"] = self.picture_link(neighbor["id"], neighbor["origin"], neighbor["key"])
            document["neighbors"] = neighbors
        return document

    def picture_link(self, row: int, origin: str, key: int | None) -> str | None:
        """Where the picture of a row may be asked for, if there can be one."""
        of_source = self.image_of_key is not None and origin == "source" and key is not None
        of_stream = self.thumbnails is not None and origin != "source"
        if of_source or of_stream:
            return f"/v1/rows/{row}/picture"
        return None

    def signs(self) -> Signs | None:
        """What the guard sees in the stream, as of a moment ago; the preset "safe" only."""
        now = time.monotonic()
        if self.bank.preset == "safe" and now >= self._signs_time + BETWEEN_SIGNS:
            self._signs = self.bank.signs()
            self._signs_time = now
            self.events.tell("signs", signs_document(self._signs))
        return self._signs

    # Remembering

    def _remember(
        self, features: Tensor, prediction: Prediction, pictures: list[bytes | None] | None, joined: Sequence[int]
    ) -> list[Query]:
        now = time.time()
        queries = self.queries.keep(features, prediction, now, pictures)
        labels = prediction.labels.tolist()
        confidence = prediction.confidence.tolist()
        self.metrics.queries.inc(len(labels))
        self.timeline.note(self.bank.position, now, labels, confidence, len(joined), self.signs())
        if len(self.events):
            for place, query in enumerate(queries):
                row = int(prediction.joined[place])
                known = row if row >= 0 else None
                data = {"query": query.name, "label": labels[place], "confidence": confidence[place], "joined": known}
                self.events.tell("answer", data)
        return queries

    def _remember_joined(
        self, prediction: Prediction, joined: Sequence[int], next_id: int, pictures: list[bytes | None] | None
    ) -> None:
        new = [row for row in joined if row >= next_id]  # a request that was sent again joined long ago
        self.facts.note_joined(new)
        self.metrics.note_offered(len(prediction.joined), len(new))
        if self.thumbnails is None or pictures is None:
            return
        for row, picture in zip(prediction.joined.tolist(), pictures, strict=True):
            if row >= next_id and picture is not None:
                self.thumbnails.keep(row, picture)


def signs_document(signs: Signs) -> dict[str, Any]:
    """What the guard sees, as it is sent."""
    return {
        "words": signs.words,
        "trust": signs.trust,
        "mixed": signs.mixed,
        "agreement": signs.agreement,
        "alarm": signs.alarm,
        "queries": signs.queries,
        "frozen": signs.frozen._asdict(),
        "given": signs.given._asdict(),
    }


def _decode(content: bytes, most_pixels: int) -> tuple[Pixels, bytes]:
    pixels = decode(content, most_pixels)
    return pixels, small_jpeg(pixels)


async def _of_app(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(_of_app)]  # the service of the app that a request came to
