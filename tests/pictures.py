"""Small real image files to read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def noise(seed: int, height: int = 9, width: int = 8) -> Tensor:
    """An image (3, H, W) uint8 that no other seed gives."""
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def paint(path: Path, seed: int = 0, height: int = 9, width: int = 8) -> Tensor:
    """Writes such an image, with its folder, and returns it; a suffix without loss gives it back exactly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = noise(seed, height, width)
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())).save(path)
    return pixels


def plant(root: Path, counts: dict[str, int], suffix: str = ".png") -> list[Path]:
    """Paints so many images into each folder below the root; all differ."""
    paths = [root / folder / f"{number:03}{suffix}" for folder, count in counts.items() for number in range(count)]
    for seed, path in enumerate(paths):
        paint(path, seed)
    return paths


def idx(values: Tensor) -> bytes:
    """The bytes of an idx file, after the specification of MNIST."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + bytes(values.flatten().tolist())
