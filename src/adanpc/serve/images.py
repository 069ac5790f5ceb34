"""Images of requests: decodes them within limits, and makes thumbnails. No other module of the service uses Pillow."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from adanpc.serve.errors import MediaTypeError, RequestError, TooLargeError

Pixels = NDArray[np.uint8]  # (H, W, 3)

# Pillow detects the format from the content, and some formats start other programs. These do not.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
LONGEST = 100  # times the shorter side: models enlarge a short one, and the longer side with it
SMALL = 256  # pixels on the longer side of a thumbnail
QUALITIES = (85, 60, 30)  # of a thumbnail; the first one that makes it small enough, or else the last
MOST_BYTES = 2**16  # in a thumbnail, as in the store


def pixels_of(content: bytes, most: int) -> int:
    """Returns the number of pixels in an image file, read from its first bytes; raises if there are too many."""
    with _opened(content, most) as image:
        count: int = image.width * image.height
    return count


def decode(content: bytes, most_pixels: int) -> Pixels:
    """Returns the pixels of an image file; gray, palette and transparent images are converted to RGB.

    The size is read from the first bytes, so that too large an image is refused before memory is allocated for it.
    """
    with _opened(content, most_pixels) as image:
        try:
            return np.array(_opaque(image))
        except Exception as error:
            raise _damaged(error) from None


def _opened(content: bytes, most: int) -> Any:
    """Returns an opened image file whose first bytes have been read, but not the pixels."""
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise MediaTypeError(f"the image is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise TooLargeError(_too_many(most)) from None
    except Exception as error:  # every decoder raises its own errors
        raise _damaged(error) from None
    if image.width * image.height > most:
        image.close()
        raise TooLargeError(_too_many(most))
    if max(image.size) > LONGEST * min(image.size):
        image.close()
        raise RequestError(f"the longer side of an image is at most {LONGEST} times the shorter: cut it into several")
    return image


def small_jpeg(pixels: Pixels) -> bytes:
    """Returns a thumbnail of an image, for people to look at."""
    image = Image.fromarray(pixels)
    image.thumbnail((SMALL, SMALL))
    for quality in QUALITIES:
        written = BytesIO()
        image.save(written, "JPEG", quality=quality)
        if written.tell() <= MOST_BYTES:
            break
    return written.getvalue()


def _opaque(image: Any) -> Any:
    """Returns the image in RGB; without the detour via RGBA, Pillow warns about transparent palettes."""
    if image.mode == "P":
        image = image.convert("RGBA")
    return image.convert("RGB")


def _too_many(most: int) -> str:
    return f"an image has at most {most:,} pixels: send a smaller one"


def _damaged(error: Exception) -> RequestError:
    return RequestError(f"the image cannot be decoded ({type(error).__name__}): it is damaged or incomplete")
