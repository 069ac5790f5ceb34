"""Images of requests: decoded within bounds, and made small to be looked at. The service's one door to Pillow."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from adanpc.serve.errors import MediaTypeError, RequestError, TooLargeError

Pixels = NDArray[np.uint8]  # (H, W, 3)

# Pillow goes by the content of a file. Some of its formats start other programs; these decode by themselves.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
SMALL = 256  # pixels, the longer side of a thumbnail
QUALITIES = (85, 60, 30)  # of a thumbnail; the first at which it is small enough
MOST_BYTES = 2**16  # of a thumbnail, as the store keeps them


def pixels_of(content: bytes, most: int) -> int:
    """How many pixels an image file has, from its first bytes; it is refused if there are too many."""
    with _opened(content, most) as image:
        count: int = image.width * image.height
    return count


def decode(content: bytes, most_pixels: int) -> Pixels:
    """The pixels of an image file; gray, palettes and transparency become RGB.

    Its size is known from the first bytes, and refused before memory is taken for the pixels.
    """
    with _opened(content, most_pixels) as image:
        try:
            return np.array(_opaque(image))
        except Exception as error:
            raise _damaged(error) from None


def _opened(content: bytes, most: int) -> Any:
    """An image file of which the first bytes were read, and not yet the pixels."""
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise MediaTypeError(f"the image is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise TooLargeError(_too_many(most)) from None
    except Exception as error:  # every decoder has errors of its own
        raise _damaged(error) from None
    if image.width * image.height > most:
        image.close()
        raise TooLargeError(_too_many(most))
    return image


def small_jpeg(pixels: Pixels) -> bytes:
    """An image in small, for people to look at."""
    image = Image.fromarray(pixels)
    image.thumbnail((SMALL, SMALL))
    for quality in QUALITIES:
        written = BytesIO()
        image.save(written, "JPEG", quality=quality)
        if written.tell() <= MOST_BYTES:
            break
    return written.getvalue()


def _opaque(image: Any) -> Any:
    """The image in RGB; without the step over RGBA Pillow warns of transparent palettes."""
    if image.mode == "P":
        image = image.convert("RGBA")
    return image.convert("RGB")


def _too_many(most: int) -> str:
    return f"an image has at most {most:,} pixels: send a smaller one"


def _damaged(error: Exception) -> RequestError:
    return RequestError(f"the image cannot be decoded ({type(error).__name__}): it is damaged or incomplete")
