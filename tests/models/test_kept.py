"""Banks of loaders: features are kept as they are made, and after a kill the model runs only on what is missing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import adanpc
from adanpc.errors import AdaNPCError
from adanpc.models import kept as kept_module
from adanpc.models.kept import KeptFeatures, digest_of_batch

# A text, so that a process that is killed runs the same as this one.
BUILD = """
import os, signal
import torch
from torch import nn
import adanpc

def build(workspace, kill_after=None):
    ran = 0

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, inputs):
            nonlocal ran
            if ran == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            ran += 1
            return self.head(self.body(inputs).relu())

    torch.manual_seed(0)
    model = Encoder()
    inputs = torch.randn(60, 6)
    labels = torch.arange(60) % 3
    batches = [(inputs[start : start + 5], labels[start : start + 5]) for start in range(0, 60, 5)]
    wrapped = adanpc.wrap(model, batches, layer="input of head", classes=3, workspace=workspace)
    return ran, wrapped.classifier.digest()
"""


def build(workspace: Path | None) -> tuple[int, str]:
    """How often the model ran, and the digest of the bank."""
    names: dict[str, Any] = {}
    exec(BUILD, names)
    made: tuple[int, str] = names["build"](workspace)
    return made


def build_and_be_killed(workspace: Path, kill_after: int) -> None:
    program = f"{BUILD}\nbuild({str(workspace)!r}, {kill_after})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_wrap_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    _, digest = build(None)
    workspace = tmp_path / "new" / "workspace"
    build_and_be_killed(workspace, 7)
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
    assert build(workspace) == (12 - 7 + 5, digest)
    assert elsewhere.read_bytes() == untouched
    assert build(workspace) == (0, digest)


def made_of(features: Tensor) -> Any:
    return lambda: features


def test_features_that_are_too_many_for_memory_are_in_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_module, "IN_MEMORY", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    batches = [torch.randn(count, 4) for count in (3, 3, 0, 5, 0, 2)]
    with KeptFeatures(None) as kept:
        for batch in batches:
            assert kept.add("", made_of(batch)) is batch
        for _ in range(2):
            found = list(kept)
            assert all(torch.equal(one, other) for one, other in zip(found, batches, strict=True))
        assert list(tmp_path.iterdir()) == []  # a process that is killed leaves nothing behind
        assert kept._spilled is not None
        os.truncate(kept._spilled.fileno(), 8)
        with pytest.raises(AdaNPCError, match="features were damaged while the bank was built"):
            list(kept)


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    features = torch.randn(3, 4)
    monkeypatch.setattr(kept_module, "replace", full)
    with (
        KeptFeatures(tmp_path) as kept,
        pytest.raises(AdaNPCError, match=r"cannot be kept in .*: No space left on device; make room"),
    ):
        kept.add("name", made_of(features))
    monkeypatch.setattr(kept_module, "IN_MEMORY", 0)
    monkeypatch.setattr(kept_module, "TemporaryFile", full)
    with KeptFeatures(None) as kept, pytest.raises(AdaNPCError, match="No space left on device; set TMPDIR"):
        kept.add("", made_of(features))


def test_a_workspace_that_is_no_folder_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    model = nn.Linear(3, 2)
    model.register_forward_hook(never)
    batches = [(torch.randn(4, 3), torch.arange(4) % 2)]
    given: list[tuple[Any, str]] = [
        (file, "file is not a folder"),
        (file / "inside", "cannot be created: "),
        ("", "workspace must be the path of a folder, got ''"),
        (3, "workspace must be the path of a folder, got 3"),
    ]
    for workspace, message in given:
        with pytest.raises(AdaNPCError, match=message):
            adanpc.wrap(model, batches, workspace=workspace)


def never(*arguments: Any) -> None:
    raise AssertionError("the model ran")


def test_an_empty_batch_is_kept(tmp_path: Path) -> None:
    empty = torch.zeros(0, 4)
    for _ in range(2):
        with KeptFeatures(tmp_path) as kept:
            kept.add("name", made_of(empty))
            assert [batch.shape for batch in kept] == [(0, 4)]


@pytest.mark.parametrize("shape", [(3, 5), (-1, 4), (2**40, 2**40), (0, 4)])
def test_a_forged_file_is_made_again(tmp_path: Path, shape: tuple[int, int]) -> None:
    path = tmp_path / "name.features"
    data = numpy.array(shape, "<i8").tobytes() + numpy.zeros(12, "<f4").tobytes()
    path.write_bytes(data + kept_module._seal(path.name, data))
    features = torch.randn(3, 4)
    with KeptFeatures(tmp_path) as kept:
        assert kept.add("name", made_of(features)) is features


def test_a_workspace_knows_models_of_other_structure_by_the_same_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = nn.Linear(3, 8)
    head = nn.Linear(8, 2)
    batches = [(torch.randn(6, 3), torch.arange(6) % 2)]
    digests = []
    for activation in (nn.ReLU(), nn.Tanh()):
        model = nn.Sequential(body, activation, head)
        with_workspace = adanpc.wrap(model, batches, workspace=tmp_path)
        digests.append(with_workspace.classifier.digest())
        assert adanpc.wrap(model, batches).classifier.digest() == digests[-1]
    assert digests[0] != digests[1]


def test_inputs_of_all_kinds_have_a_digest() -> None:
    complex_numbers = torch.randn(2, 3, dtype=torch.complex64)
    sparse = torch.eye(3).to_sparse()
    kinds: list[Any] = [complex_numbers.conj(), complex_numbers.conj().imag, sparse, {1, 2}]
    for inputs in kinds:
        digest_of_batch({}, inputs)
    assert digest_of_batch({}, complex_numbers.conj()) == digest_of_batch({}, complex_numbers.conj().resolve_conj())
    assert digest_of_batch({}, sparse) != digest_of_batch({}, 2 * sparse)
    with pytest.raises(AdaNPCError, match="a workspace cannot tell inputs of type function apart"):
        digest_of_batch({}, [made_of(sparse)])


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
