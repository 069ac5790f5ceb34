"""Banks of images: built a piece at a time, and after a kill from where they were."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from adanpc import cli
from adanpc.core import MemoryBank, large
from adanpc.errors import AdaNPCError
from adanpc.lab import banks
from adanpc.lab.data import read_images
from adanpc.lab.networks import build
from adanpc.lab.networks import features as features_module
from adanpc.lab.networks.features import features, features_in_pieces
from adanpc.store import DurableBank

# The command, killed once it has written five pieces.
KILLED = """
import os, signal, sys
from adanpc import cli
from adanpc.lab.networks import features

features.BATCH = 2
features.PIECE = 8
write = features.write_sealed
written = []

def write_and_count(*arguments):
    write(*arguments)
    written.append(arguments)
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)

features.write_sealed = write_and_count
cli.app(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def weights(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights, so that every process has the same model."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "convnet.safetensors"
    save_file(build("convnet", 3, channels=3).encoder.state_dict(), path)
    return path


def create(bank: Path, images: Path, weights: Path, preset: str) -> list[str]:
    """The arguments of the command."""
    options = ["--encoder", "convnet", "--weights", str(weights), "--preset", preset]
    return ["bank", "create", str(bank), "--from", str(images), *options]


def pieces_encoded(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the command in this process, and tells how many pieces it encoded."""
    encode = features_module._encode
    encoded: list[int] = []

    def counted(model: Any, domain: Any, *others: Any) -> Any:
        encoded.append(len(domain))
        return encode(model, domain, *others)

    with monkeypatch.context() as patches:
        patches.setattr(features_module, "BATCH", 2)
        patches.setattr(features_module, "PIECE", 8)
        patches.setattr(features_module, "_encode", counted)
        done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    return len(encoded)


@pytest.mark.parametrize("preset", ["paper", "safe"])
def test_a_build_that_is_killed_goes_on_where_it_was(
    data_dir: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """90 images in three domains: 12 pieces."""
    assert pieces_encoded(create(tmp_path / "whole", data_dir, weights, preset), monkeypatch) == 12
    killed = tmp_path / "killed"
    workspace = tmp_path / ".killed.building"
    arguments = create(killed, data_dir, weights, preset)
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not killed.exists()
    assert len(list(workspace.glob("*.safetensors"))) == 5
    damaged = sorted(workspace.glob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert pieces_encoded(arguments, monkeypatch) == 12 - 5 + 1
    assert not workspace.exists()
    with DurableBank.open(tmp_path / "whole") as whole, DurableBank.open(killed) as resumed:
        assert resumed.digest() == whole.digest()
        assert len(resumed.contents) == 90


def test_pieces_are_the_features_of_the_whole(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "BATCH", 4)
    monkeypatch.setattr(features_module, "PIECE", 8)
    model = build("convnet", 3, channels=3).eval()
    domain = read_images(data_dir).domains[0].with_transform(model.preprocessing)
    whole = features(model, domain, workers=0, size=4)
    for folder in (None, tmp_path, tmp_path):
        pieces = list(features_in_pieces(model, domain, folder, workers=0))
        assert [len(piece) for piece in pieces] == [8, 8, 8, 6]
        assert torch.equal(torch.cat(pieces), whole)
    assert len(list(tmp_path.iterdir())) == 4


def test_no_more_than_a_piece_of_features_is_in_memory(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "BATCH", 4)
    monkeypatch.setattr(features_module, "PIECE", 8)
    learned: list[int] = []
    apply = MemoryBank.apply

    def counting(self: Any, change: Any, **options: Any) -> Any:
        learned.append(len(change.features))
        return apply(self, change, **options)

    monkeypatch.setattr(MemoryBank, "apply", counting)
    made = banks.of_images(read_images(data_dir), "convnet", preset="paper")
    assert max(learned) == 8
    table = made.classifier.bank.table()
    assert torch.equal(table["key"], torch.arange(90))
    assert table["domain"].bincount().tolist() == [30, 30, 30]
    learned.clear()
    banks.of_images(read_images(data_dir), "convnet", preset="paper", settings={"centering": "source"})
    assert learned == [90], "a mean is made of all rows"
    learned.clear()
    banks.of_images(read_images(data_dir), "convnet", preset="safe")
    assert learned == [90], "a transform is fitted to all rows, as long as they are few"
    learned.clear()
    monkeypatch.setattr(large, "AT_ONCE", 40 * made.classifier.bank.dim)
    encode = features_module._encode
    encoded: list[int] = []

    def encoding(model: Any, domain: Any, *arguments: Any) -> Any:
        encoded.append(len(domain))
        return encode(model, domain, *arguments)

    monkeypatch.setattr(features_module, "_encode", encoding)
    banks.of_images(read_images(data_dir), "convnet", preset="safe")
    assert max(learned) == 8
    assert sum(learned) == sum(encoded) == 90, "features are made once, and read several times"


def test_one_process_builds_at_a_time(tmp_path: Path) -> None:
    with (
        banks.workspace_for(tmp_path / "bank"),
        pytest.raises(AdaNPCError, match=r"another process is building .*bank: wait for it"),
        banks.workspace_for(tmp_path / "bank"),
    ):
        raise AssertionError("both are building")
    assert os.listdir(tmp_path) == []


def test_what_was_made_stays_when_the_work_fails(tmp_path: Path) -> None:
    def interrupted() -> None:
        with banks.workspace_for(tmp_path / "bank") as folder:
            (folder / "piece").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with banks.workspace_for(tmp_path / "bank") as folder:
        assert (folder / "piece").exists()
    assert os.listdir(tmp_path) == []


def test_a_file_system_that_keeps_an_open_file_does_not_fail_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")  # as NFS says while the lock is open

    with banks.workspace_for(tmp_path / "bank") as folder:
        (folder / "piece").touch()
        monkeypatch.setattr(os, "rmdir", refused)
    assert not (folder / "piece").exists()
