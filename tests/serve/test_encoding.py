"""Images of many requests become features together, and each request gets its own."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adanpc.errors import UnavailableError
from adanpc.serve.encoding import BatchingEncoder


def image(value: int) -> Any:
    return np.full((1, 1, 3), value, np.uint8)


def values(images: Sequence[Any]) -> Tensor:
    return torch.tensor([[float(pixels[0, 0, 0])] for pixels in images])


class Gated:
    """An encoder that waits to be let go, and remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.begun = Event()
        self.go = Event()
        self.sizes: list[int] = []

    def __call__(self, images: Sequence[Any]) -> Tensor:
        self.begun.set()
        assert self.go.wait(300)
        self.sizes.append(len(images))
        if any(pixels[0, 0, 0] == 13 for pixels in images):
            raise ValueError("13 is not encoded")
        return values(images)


def test_what_arrives_while_the_encoder_is_busy_is_encoded_together() -> None:
    gated = Gated()
    encoder = BatchingEncoder(gated, most=4)
    first = encoder.submit(image(1))
    assert gated.begun.wait(300)
    others = [encoder.submit(image(value)) for value in range(2, 8)]
    assert encoder.waiting == 6
    gated.go.set()
    assert [future.result(300).item() for future in (first, *others)] == [1, 2, 3, 4, 5, 6, 7]
    assert gated.sizes == [1, 4, 2]
    encoder.close()


def test_an_image_that_fails_takes_no_other_with_it() -> None:
    gated = Gated()
    encoder = BatchingEncoder(gated)
    first = encoder.submit(image(1))
    assert gated.begun.wait(300)
    good, bad, fine = (encoder.submit(image(value)) for value in (2, 13, 3))
    gated.go.set()
    assert [future.result(300).item() for future in (first, good, fine)] == [1, 2, 3]
    with pytest.raises(ValueError, match="13 is not encoded"):
        bad.result(300)
    encoder.close()


def test_the_end_waits_for_what_has_arrived_and_takes_no_more() -> None:
    gated = Gated()
    encoder = BatchingEncoder(gated)
    first = encoder.submit(image(1))
    assert gated.begun.wait(300)
    second = encoder.submit(image(2))
    gated.go.set()
    encoder.close()
    assert (first.result(0).item(), second.result(0).item()) == (1, 2)
    with pytest.raises(UnavailableError, match="the service ends"):
        encoder.submit(image(3))
