"""Service: a durable bank, together with what the process keeps in memory for its clients and for people who look."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from adanpc.core import Change, Contents, Prediction
from adanpc.core.guard import Signs
from adanpc.errors import AdaNPCError, FeatureError
from adanpc.serve.answers import answer_document, names_of, neighbor_documents
from adanpc.serve.batcher import AnsweredTogether, Batcher, Features, Pending
from adanpc.serve.encoding import BatchingEncoder, Encoder
from adanpc.serve.errors import MediaTypeError, TooLargeError
from adanpc.serve.events import Events
from adanpc.serve.facts import RowFacts
from adanpc.serve.images import Pixels, decode, pixels_of, small_jpeg
from adanpc.serve.limits import BODIES, Held, Limits
from adanpc.serve.metrics import Metrics
from adanpc.serve.plane import Plane
from adanpc.serve.queries import KeptQueries, Queries, Query
from adanpc.serve.room import Room
from adanpc.serve.timeline import Timeline
from adanpc.store import DurableBank, Thumbnails
from adanpc.store.durable import Part
from adanpc.store.latest import read_latest, write_latest

logger = logging.getLogger("adanpc.serve")

ImageOfKey = Callable[[int], Pixels | None]  # the image of a source row, by the row's key
LARGEST_IMAGES_AT_ONCE = 4  # that are decoded; of smaller images, as many as have as many pixels
CHANGES_SHOWN_AT_START = 2000  # in the timeline of a new process
BETWEEN_SAVES = 10.0  # seconds for which new queries are only in memory
BETWEEN_SIGNS = 1.0  # the fewest seconds between two readings of the signs of the stream


class Answer(NamedTuple):
    """The answer to a request."""

    part: Part
    kept: KeptQueries  # its queries, possibly with those of other requests that were answered together with it

    @property
    def queries(self) -> list[Query]:
        """The queries of the request, as they are kept."""
        numbers = range(self.kept.number_at(self.part.begin), self.kept.number_at(self.part.end))
        return [self.kept.query(number) for number in numbers]


class Service:
    """Answers queries, makes changes and remembers both. The bank alone decides the order of events.

    Only the thread of one event loop may use it, except that the latest queries are saved by any thread, one save at a
    time.

    Args:
        bank: the bank that answers. It is not closed by the service.
        encoder: turns images into features (B, D); needed to answer images.
        thumbnails: keeps small pictures of queries that join, if given.
        image_of_key: finds the image of a source row.
        limits: the limits on requests.
        folder: the folder of the bank, to keep the latest queries there for the next process; None to not keep them.
    """

    def __init__(
        self,
        bank: DurableBank,
        *,
        encoder: Encoder | None = None,
        thumbnails: Thumbnails | None = None,
        image_of_key: ImageOfKey | None = None,
        limits: Limits | None = None,
        folder: Path | None = None,
    ) -> None:
        self.bank = bank
        self.limits = limits or Limits()
        self.held = Held(BODIES * self.limits.body)
        self.thumbnails = thumbnails
        self.image_of_key = image_of_key
        self.queries = Queries()
        self._folder = folder
        self._saving = Lock()
        self._save_is_due = False
        if folder is not None:
            self._restore(folder)
        self.events = Events(self.limits.listeners)
        self.facts = RowFacts()
        self.plane = Plane()
        self.timeline = Timeline(bank.contents.settings.classes)
        self.encoder = None
        if encoder is not None:
            self.encoder = BatchingEncoder(encoder)
        self._room = Room(LARGEST_IMAGES_AT_ONCE * self.limits.pixels)
        self._decoders = CapacityLimiter(os.cpu_count() or 1)
        self._look_backs = CapacityLimiter(1)
        self._predictions = CapacityLimiter(os.cpu_count() or 1)
        self.metrics = Metrics(self)
        self._batcher = Batcher(bank, self._note)
        self._signs: Signs | None = None
        self._signs_time = -math.inf  # when they were last read
        start = max(bank.log.start, bank.position - CHANGES_SHOWN_AT_START)
        self.timeline.seed(enumerate(bank.log.read(start), start + 1))

    @property
    def names(self) -> Sequence[str]:
        """The names of the classes."""
        return names_of(self.bank.contents.settings)

    def close(self) -> None:
        """Disconnects listeners, encodes the images that have arrived, and saves the latest queries."""
        self.events.close()
        if self.encoder is not None:
            self.encoder.close()
        self._save(ended=True)

    # Asking

    @property
    def waiting_images(self) -> int:
        """The number of images that have been received and not encoded yet."""
        waiting = len(self._room)
        if self.encoder is not None:
            waiting += self.encoder.waiting
        return waiting

    async def encode(self, content: bytes) -> tuple[Features, bytes]:
        """Returns the features (1, D) of an image file, and a small picture of it."""
        if self.encoder is None:
            raise MediaTypeError("this service has no encoder for images: send features, or start it with --model")
        count = await self._in_thread(pixels_of, content, self.limits.pixels)
        async with self._room.taken(count):  # held until the image is encoded, when its pixels are freed
            pixels, picture = await self._in_thread(_decode, content, self.limits.pixels)
            features = await asyncio.wrap_future(self.encoder.submit(pixels))
        return features[None].cpu().float().numpy(), picture

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function that decodes an image in a thread; at most one per core runs at a time."""
        return await to_thread.run_sync(function, *arguments, limiter=self._decoders)

    async def classify(self, features: Features, *, request: str = "", pictures: Sequence[bytes | None] = ()) -> Answer:
        """Answers queries (B, D), and lets the bank learn from them."""
        self._check(features)
        answer: Answer = await self._batcher.ask(features, request, pictures)
        return answer

    async def predict(self, features: Features, *, pictures: Sequence[bytes | None] = ()) -> Answer:
        """Answers queries (B, D) without learning from them."""
        self._check(features)
        queries = torch.from_numpy(features.copy())  # the array may be read-only, which torch does not support
        prediction = await self.run_prediction(self.bank.predict, queries)
        kept = self._remember(queries, prediction, 0, pictures, [])
        return Answer(Part(prediction, 0, len(queries)), kept)

    async def preview(self, features: Tensor, without: Iterable[int]) -> Prediction:
        """Returns the answers as they would be without some rows; leaves no trace."""
        predict = partial(self.bank.predict, without=without)
        prediction: Prediction = await self.run_prediction(predict, features)
        return prediction

    async def run_prediction(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function that answers queries and changes nothing; at most one per core, to bound their memory."""
        return await to_thread.run_sync(function, *arguments, limiter=self._predictions)

    def _check(self, features: Features) -> None:
        """Raises an error if the queries do not have the bank's width, or are more than a request may hold."""
        dim = self.bank.contents.settings.dim
        if features.ndim != 2 or features.shape[1] != dim:
            raise FeatureError(f"features must have shape (B, {dim}), got {features.shape}")
        if len(features) > self.limits.queries:
            raise TooLargeError(
                f"a request holds at most {self.limits.queries:,} queries, got {len(features):,}: cut it into several"
            )

    # Changing

    async def apply(self, change: Change) -> int:
        """Applies an expert's change, and returns the bank's position after it."""
        return await self.decide(lambda contents: change)

    async def decide(self, make: Callable[[Contents], Change]) -> int:
        """Applies the change that ``make`` returns when its turn comes, and returns the bank's position after it."""
        applied = await run_in_threadpool(self.bank.decide, make)
        change = applied.change
        rows = len(getattr(change, "ids", ()))
        return self._changed(applied.position, type(change).__name__.lower(), rows, change.who)

    async def rollback(self, to: int, *, who: str, why: str) -> int:
        """Rolls the bank back to an earlier position, and returns its position after that."""
        position = await self.look_back(partial(self.bank.rollback, to, who=who, why=why))
        return self._changed(position, "rollback", 0, who)

    async def look_back(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function that needs the bank of an earlier position; one at a time, as that takes as much memory."""
        return await to_thread.run_sync(function, *arguments, limiter=self._look_backs)

    def _changed(self, position: int, kind: str, rows: int, who: str) -> int:
        self.facts.forget()
        self.metrics.changes.labels(kind).inc()
        self.events.tell("change", {"position": position, "kind": kind, "rows": rows, "who": who})
        return position

    # Showing

    def document(self, query: Query, *, with_neighbors: bool = True) -> dict[str, Any]:
        """Returns the JSON document of a kept query with its answer."""
        document = self.answer(query.prediction, query.place, with_neighbors=with_neighbors)
        picture = None
        if query.picture is not None:
            picture = f"/v1/queries/{query.name}/picture"
        return {"query": query.name, "time": query.time, "picture": picture, **document}

    def answer(self, prediction: Prediction, place: int, *, with_neighbors: bool = True) -> dict[str, Any]:
        """Returns the JSON document of the answer to one query of a prediction."""
        document = answer_document(prediction, place, self.names)
        if with_neighbors:
            neighbors = neighbor_documents(prediction, place, self.bank.contents, self.facts)
            for neighbor in neighbors:
                neighbor["picture"] = self.picture_link(neighbor["id"], neighbor["origin"], neighbor["key"])
            document["neighbors"] = neighbors
        return document

    def picture_link(self, row: int, origin: str, key: int | None) -> str | None:
        """Returns the path of a row's picture, or None if there cannot be one."""
        of_source = self.image_of_key is not None and origin == "source" and key is not None
        of_stream = self.thumbnails is not None and origin != "source"
        if of_source or of_stream:
            return f"/v1/rows/{row}/picture"
        return None

    def signs(self) -> Signs | None:
        """Returns what the guard saw in the stream a moment ago; None unless the preset is "safe"."""
        now = time.monotonic()
        if self.bank.preset == "safe" and now >= self._signs_time + BETWEEN_SIGNS:
            self._signs = self.bank.signs()
            self._signs_time = now
            self.events.tell("signs", signs_document(self._signs))
        return self._signs

    # Remembering

    def forget(self, rows: Sequence[int]) -> None:
        """Removes the pictures of deleted rows and the queries that became these rows, both in memory and on disk."""
        self.queries.forget(rows)
        self._save(ended=False)
        if self.thumbnails is not None:
            self.thumbnails.forget(rows)

    def _restore(self, folder: Path) -> None:
        """Restores the latest queries of an earlier process, except those whose rows were deleted since."""
        contents = self.bank.contents
        latest = read_latest(folder, contents.settings)
        if latest is not None:
            self.queries.restore(latest)
            self.queries.forget(contents.deleted)

    def _save_soon(self) -> None:
        """Schedules saving the latest queries, unless that is scheduled already."""
        if self._folder is None or self._save_is_due:
            return
        self._save_is_due = True
        loop = asyncio.get_running_loop()
        loop.call_later(BETWEEN_SAVES, lambda: loop.run_in_executor(None, self._save))

    def _save(self, *, ended: bool = False) -> None:
        """Saves the latest queries for the next process; if that fails, they are lost when this process ends.

        Any thread may call it.
        """
        if self._folder is None:
            return
        with self._saving:  # one save at a time, so that the newest one is written last
            self._save_is_due = False
            latest = self.queries.latest(ended=ended)
            if latest is not None and self.thumbnails is None:  # pictures may be private
                latest = latest._replace(pictures=[None] * len(latest.pictures))
            try:
                write_latest(self._folder, latest)
            except (AdaNPCError, OSError) as error:
                logger.warning("the latest queries were not kept", extra={"error": str(error)})

    def _note(self, answered: AnsweredTogether) -> list[Answer]:
        """Records requests that were answered together, and returns the answer to each."""
        first = answered.parts[0]
        last = answered.parts[-1]
        prediction = first.together
        features = np.concatenate([pending.features for pending in answered.requests])
        pictures = _pictures_of(answered.requests)
        rows = []
        if not first.again:  # a repeated request was learned from and counted before
            joined = prediction.joined[first.begin : last.end].tolist()
            rows = [row for row in joined if row >= 0]
            self.facts.note_joined(rows)
            self.metrics.note_offered(len(joined), len(rows))
            self._keep_pictures(joined, pictures)
        kept = self._remember(torch.from_numpy(features), prediction, first.begin, pictures, rows)
        return [Answer(part, kept) for part in answered.parts]

    def _keep_pictures(self, joined: Sequence[int], pictures: Sequence[bytes | None]) -> None:
        """Keeps the pictures of queries that joined; ``joined`` has the row that each query became, or -1."""
        if self.thumbnails is None:
            return
        for row, picture in zip(joined, pictures, strict=False):  # there are no pictures of features
            if row >= 0 and picture is not None:
                self.thumbnails.keep(row, picture)

    def _remember(
        self,
        features: Tensor,
        prediction: Prediction,
        begin: int,
        pictures: Sequence[bytes | None],
        rows: Sequence[int],
    ) -> KeptQueries:
        """Keeps queries (B, D), whose answers begin at ``begin`` in a prediction, and announces them.

        ``rows`` has the rows that some of them have just become.
        """
        now = time.time()
        kept = self.queries.keep(features, prediction, now, begin=begin, pictures=pictures)
        end = begin + len(features)
        labels = prediction.labels[begin:end].tolist()
        confidence = prediction.confidence[begin:end].tolist()
        self.metrics.queries.inc(len(labels))
        self.timeline.note(self.bank.position, now, labels, confidence, len(rows), self.signs())
        if len(self.events):
            for number, label, certainty in zip(kept.numbers, labels, confidence, strict=True):
                row = int(prediction.joined[kept.place_of(number)])
                joined = None
                if row >= 0:
                    joined = row
                data = {"query": f"q-{number}", "label": label, "confidence": certainty, "joined": joined}
                self.events.tell("answer", data)
        self._save_soon()
        return kept


def _pictures_of(requests: Sequence[Pending]) -> Sequence[bytes | None]:
    """Returns the pictures of all queries of some requests; empty if no request has any."""
    if not any(pending.pictures for pending in requests):
        return ()
    pictures: list[bytes | None] = []
    for pending in requests:
        pictures += pending.pictures or [None] * len(pending.features)
    return pictures


def signs_document(signs: Signs) -> dict[str, Any]:
    """Returns the JSON document of what the guard sees."""
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


ServiceOfApp = Annotated[Service, Depends(_of_app)]  # of the app that a request came to
