"""What all tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image

torch.set_num_threads(1)  # several test processes share the cores
os.environ["OMP_NUM_THREADS"] = "1"  # and so do the programs that they start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and all that they start

# Tests pass on a busy machine, too: nothing fails because it was slow.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The secret of the account that runs the tests is left alone: they make one of their own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images that can be learned at once: three brightnesses of three colors, ten images of each."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for level, domain in enumerate(("dim", "plain", "bright")):
        for label, name in enumerate(("red", "green", "blue")):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for number in range(10):
                pixels = 120 * np.eye(3)[label] + 30 * level + rng.integers(0, 60, (8, 8, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root
