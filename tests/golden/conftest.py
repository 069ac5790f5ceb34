"""What the golden tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    """The peers ran in double precision, so that a difference is no matter of rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _read(name: str) -> dict[str, Tensor]:
    """The arrays of a file: whole numbers as int64, all others as float64."""
    arrays = {}
    with np.load(FOLDER / f"{name}.npz") as file:
        for key in file.files:
            tensor = torch.from_numpy(file[key])
            arrays[key] = tensor.double() if tensor.is_floating_point() else tensor.long()
    return arrays


@pytest.fixture(scope="session")
def images() -> dict[str, Tensor]:
    """A network, batches of images, and the peers' answers to them."""
    return _read("images")


@pytest.fixture(scope="session")
def features() -> dict[str, Tensor]:
    """The rows of a head, features, and the peers' answers to them."""
    return _read("features")


@pytest.fixture(scope="session")
def training() -> dict[str, Tensor]:
    """Batches of three domains, and what the peers make of a model with them."""
    return _read("training")
