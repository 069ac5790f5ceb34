"""Banks of loaders: features are kept as they are made, and after a kill the model runs only on what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.models import kept as kept_module
from adanpc.models.kept import KeptFeatures, digest_of_batch

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import adanpc

workspace, kill_after = sys.argv[1:]
left = int(kill_after)
ran = 0

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        global ran
        if ran == left:
            os.kill(os.getpid(), signal.SIGKILL)
        ran += 1
        return self.head(self.body(inputs).relu())

torch.manual_seed(0)
model = Encoder()
inputs = torch.randn(60, 6)
labels = torch.arange(60) % 3
batches = [(inputs[start : start + 5], labels[start : start + 5]) for start in range(0, 60, 5)]
wrapped = adanpc.wrap(model, batches, layer="input of head", classes=3, workspace=workspace or None)
print(ran, wrapped.classifier.digest())
"""


def build(workspace: Path | str, kill_after: int) -> tuple[int, str]:
    """How often the model ran and the digest of the bank, from a process; (-9, "") if that was killed."""
    command = [sys.executable, "-c", SCRIPT, str(workspace), str(kill_after)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGKILL:
        return -9, ""
    assert done.returncode == 0, done.stderr
    ran, digest = done.stdout.split()
    return int(ran), digest


def test_a_wrap_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    _, digest = build("", -1)
    workspace = tmp_path / "new" / "workspace"
    assert build(workspace, 7) == (-9, "")
    files = sorted(workspace.glob("*.features"))
    assert len(files) == 7
    damaged = bytearray(files[0].read_bytes())
    damaged[20] ^= 1
    files[0].write_bytes(damaged)
    files[1].write_bytes(b"short")
    files[2].write_bytes(files[3].read_bytes())  # features of another batch, with their own seal
    elsewhere = files[4].rename(tmp_path / "elsewhere")
    files[4].symlink_to(elsewhere)
    os.mkfifo(files[5].with_suffix(".pipe"))
    files[5].with_suffix(".pipe").rename(files[5])
    untouched = elsewhere.read_bytes()
    assert build(workspace, -1) == (12 - 7 + 5, digest)
    assert elsewhere.read_bytes() == untouched
    assert build(workspace, -1) == (0, digest)


def made_of(features: Tensor) -> Any:
    return lambda: features


def test_features_that_are_too_many_for_memory_are_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "IN_MEMORY", 100)
    batches = [torch.randn(count, 4) for count in (3, 3, 0, 5)]
    with KeptFeatures(None) as kept:
        for batch in batches:
            assert kept.add("", made_of(batch)) is batch
        for _ in range(2):
            found = list(kept)
            assert all(torch.equal(one, other) for one, other in zip(found, batches, strict=True))
        assert kept._temporary is not None
        folder = Path(kept._temporary.name)
        assert len(list(folder.iterdir())) == 1
        (folder / "3").unlink()
        with pytest.raises(AdaNPCError, match="was damaged or removed while the bank was built"):
            list(kept)
    assert not folder.exists()


def test_a_digest_tells_inputs_apart() -> None:
    origin = {"weights": "a"}
    words = numpy.array(["a", "b"], dtype=object)
    kinds: list[Any] = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.tensor(True),
        numpy.zeros((2, 3)),
        numpy.zeros((2, 3), numpy.float32),
        [torch.zeros(2), torch.zeros(3)],
        [[torch.zeros(2)], torch.zeros(3)],
        {"ids": torch.zeros(2, 3)},
        {"mask": torch.zeros(2, 3)},
        words,
        ["a", "b"],
        "ab",
        (torch.zeros(2, 3), 1),
    ]
    digests = [digest_of_batch(origin, inputs) for inputs in kinds]
    assert len(set(digests)) == len(kinds)
    assert digests == [digest_of_batch(origin, inputs) for inputs in kinds]
    assert digest_of_batch({"weights": "b"}, kinds[0]) != digests[0]
    assert digest_of_batch(origin, torch.zeros(3, 2).T) == digests[0]
