"""Encoding: turns the images of many requests into features in one batch, and gives each request its own."""

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
MOST_TOGETHER = 32  # images in a batch


class Waiting(NamedTuple):
    """An image whose features a caller is waiting for."""

    pixels: Pixels
    features: Future[Tensor]


class BatchingEncoder:
    """Runs an encoder in a thread of its own, on all images that arrived while it was busy.

    No image waits for others to arrive: one that comes alone is encoded alone.

    Args:
        encoder: turns images into features (B, D), in the order of the images.
        most: the most images in a batch.
    """

    def __init__(self, encoder: Encoder, most: int = MOST_TOGETHER) -> None:
        self._encoder = encoder
        self._most = most
        self._arrived: SimpleQueue[Waiting | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name="adanpc-encoder", daemon=True)
        self._thread.start()

    def submit(self, pixels: Pixels) -> Future[Tensor]:
        """Returns a future of the features (D,) of an image."""
        if self._closed:
            raise UnavailableError("the service ends: try again when it has started again")
        future: Future[Tensor] = Future()
        self._arrived.put(Waiting(pixels, future))
        return future

    @property
    def waiting(self) -> int:
        """The number of images that are waiting to be encoded."""
        return self._arrived.qsize()

    def close(self) -> None:
        """Encodes the images that have arrived, then stops the thread."""
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
            # A caller may have stopped waiting, for example because its connection is gone. Its future is canceled, and
            # setting a result would raise an error that ends the thread.
            awaited = [waiting for waiting in batch if waiting.features.set_running_or_notify_cancel()]
            if awaited:
                self._encode(awaited)
            if ended:
                return

    def _encode(self, batch: list[Waiting]) -> None:
        """Resolves each future with features or an error; if a batch fails, each image is tried on its own."""
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
