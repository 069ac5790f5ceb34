"""Images of requests: every format that is read, whatever its colors, and nothing that pretends to be one."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adanpc.serve.errors import MediaTypeError, RequestError, TooLargeError
from adanpc.serve.images import FORMATS, MOST_BYTES, SMALL, decode, small_jpeg

PLENTY = 10**6


def written(image: Any, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colored(mode: str = "RGB") -> Any:
    return Image.new("RGB", (6, 4), (200, 40, 90)).convert(mode)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind: str) -> None:
    pixels = decode(written(colored(), kind), PLENTY)
    assert pixels.shape == (4, 6, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - [200, 40, 90]).max() < 12  # some of them lose a little


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK", "YCbCr"])
def test_every_way_to_write_colors_becomes_rgb(mode: str) -> None:
    kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        image = Image.new("I;16", (6, 4), 40_000) if mode == "I;16" else colored(mode)
    assert decode(written(image, kind), PLENTY).shape == (4, 6, 3)


def test_a_transparent_palette_is_no_warning() -> None:
    content = written(colored("P"), "PNG", transparency=b"\x00\x80\xff")
    assert decode(content, PLENTY).shape == (4, 6, 3)


def test_what_is_too_large_is_known_before_it_is_decoded() -> None:
    with pytest.raises(TooLargeError, match="at most 23 pixels"):
        decode(written(colored(), "PNG"), 23)
    bomb = bytearray(written(colored(), "PNG"))
    bomb[16:24] = (2**31 - 1).to_bytes(4, "big") * 2  # width and height in its first chunk
    with pytest.raises((TooLargeError, RequestError)):
        decode(bytes(bomb), PLENTY)


def test_what_is_no_image_or_half_of_one_is_refused() -> None:
    with pytest.raises(MediaTypeError, match="the image is none of JPEG, PNG"):
        decode(b"%PDF-1.7", PLENTY)
    whole = written(Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3)).astype(np.uint8)), "PNG")
    with pytest.raises(RequestError, match="it is damaged or incomplete"):
        decode(whole[: len(whole) // 2], PLENTY)


def test_other_formats_of_pillow_are_not_read() -> None:
    for kind in ("ICO", "PCX"):
        with pytest.raises(MediaTypeError):
            decode(written(colored(), kind), PLENTY)


def test_a_thumbnail_is_small_whatever_it_shows() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (900, 700, 3)).astype(np.uint8)
    for pixels in (noise, np.zeros((3, 900, 3), np.uint8), np.zeros((1, 1, 3), np.uint8)):
        made = small_jpeg(pixels)
        assert len(made) <= MOST_BYTES
        assert max(Image.open(BytesIO(made)).size) <= SMALL
