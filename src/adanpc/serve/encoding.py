"""Encoding: images of many requests become features together, and each request gets its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from torch import Tensor

from adanpc.errors import UnavailableError
from adanpc.serve.images import Pixels

Encoder = Callable[[Sequence[Pixels]], Tensor]  # images to features (B, D)
MOST_TOGETHER = 32  # images


class Waiting(NamedTuple):
    """An image that somebody waits for."""

    pixels: Pixels
    features: Future[Tensor]


class BatchingEncoder:
    """Runs an encoder in a thread of its own, on all images that have arrived while it was busy.

    Nobody waits for others to come: an image that comes alone is encoded alone.

    Args:
        encoder: images to features (B, D), in the order of the images.
        most: images at a time.
    """

    def __init__(self, encoder: Encoder, most: int = MOST_TOGETHER) -> None:
        self._encoder = encoder
        self._most = most
        self._arrived: SimpleQueue[Waiting | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name="adanpc-encoder", daemon=True)
        self._thread.start()

    def submit(self, pixels: Pixels) -> Future[Tensor]:
        """The features (D,) of an image, as soon as it was encoded."""
        if self._closed:
            raise UnavailableError("the service ends: try again when it has started again")
        future: Future[Tensor] = Future()
        self._arrived.put(Waiting(pixels, future))
        return future

    @property
    def waiting(self) -> int:
        """How many images have not been encoded yet."""
        return self._arrived.qsize()

    def close(self) -> None:
        """Encodes what has arrived, and ends."""
        self._closed = True
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            first = self._arrived.get()
            if first is None:
                return
            batch = [first]
            ended = False
            while len(batch) < self._most and not self._arrived.empty():
                following = self._arrived.get()
                if following is None:
                    ended = True
                    break
                batch.append(following)
            # Who no longer waits, because the connection is gone, say, cannot be answered: trying would end the thread.
            awaited = [waiting for waiting in batch if waiting.features.set_running_or_notify_cancel()]
            if awaited:
                self._encode(awaited)
            if ended:
                return

    def _encode(self, batch: list[Waiting]) -> None:
        """Gives everyone their features, or an error; if a batch fails, each image is tried alone."""
        try:
            features = self._encoder([waiting.pixels for waiting in batch])
            answers = list(zip(batch, features, strict=True))
        except BaseException as error:
            if len(batch) == 1:
                batch[0].features.set_exception(error)
                return
            for waiting in batch:
                self._encode([waiting])
        else:
            for waiting, feature in answers:
                waiting.features.set_result(feature)
