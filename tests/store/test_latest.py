"""The latest answers of a service outlive its process, whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from services import filled, queries

from adanpc.store import latest as module
from adanpc.store.answers import part_of
from adanpc.store.latest import FILE, Latest, latest_of, read_latest, write_latest
from adanpc.store.log import LogError

SETTINGS = filled().bank.contents.settings


def made(count: int = 3) -> Latest:
    features = torch.from_numpy(queries(count))
    answers = filled().step(features)
    pictures: list[bytes | None] = [b"a picture", None, b""]
    return latest_of(
        range(5, 5 + count),
        list(features),
        [1.5, 2.5, 3.5][:count],
        [part_of(answers, slice(place, place + 1)) for place in range(count)],
        pictures[:count],
        100,
        ended=True,
    )


def test_they_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = made()
    write_latest(tmp_path, written)
    found = read_latest(tmp_path, SETTINGS)
    assert found is not None
    for name in ("numbers", "features", "times"):
        assert getattr(found, name).equal(getattr(written, name))
    for name in ("probs", "weights", "joined", "trust", "frozen", "novelty"):
        assert getattr(found.answers, name).equal(getattr(written.answers, name))
    assert found.answers.neighbors.ids.equal(written.answers.neighbors.ids)
    assert found[4:] == ([b"a picture", None, b""], 100, True)
    write_latest(tmp_path, None)
    write_latest(tmp_path, None)
    assert read_latest(tmp_path, SETTINGS) is None


def test_a_file_with_any_byte_altered_is_not_read(tmp_path: Path) -> None:
    write_latest(tmp_path, made(1))
    path = tmp_path / FILE
    data = path.read_bytes()
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        path.write_bytes(altered)
        assert read_latest(tmp_path, SETTINGS) is None
    for length in (0, 5, 31, 32, len(data) - 1):
        path.write_bytes(data[:length])
        assert read_latest(tmp_path, SETTINGS) is None


def forged(folder: Path, changed: dict[str, torch.Tensor | None]) -> Path:
    """A file with some tensors changed or left out, and a true seal, which anybody can make."""
    write_latest(folder, made())
    path = folder / FILE
    tensors: dict[str, torch.Tensor | None] = {**load(path.read_bytes()[module.SEAL :]), **changed}
    data = save({name: tensor for name, tensor in tensors.items() if tensor is not None})
    path.write_bytes(hashlib.sha256(data).digest() + data)
    return folder


@pytest.mark.parametrize(
    "changed",
    [
        {"numbers": None},
        {"next": torch.zeros(5)},
        {"answers": torch.zeros(9, dtype=torch.uint8)},
        {"picture_sizes": torch.zeros(2, 2)},
        {"picture_sizes": torch.zeros(2, dtype=torch.int64)},
        {"features": torch.zeros(3, 1)},
        {"times": torch.zeros(3)},
    ],
    ids=str,
)
def test_forged_files_are_not_read(tmp_path: Path, changed: dict[str, torch.Tensor | None]) -> None:
    assert read_latest(forged(tmp_path, changed), SETTINGS) is None


def test_a_forged_file_that_changes_nothing_is_read(tmp_path: Path) -> None:
    assert read_latest(forged(tmp_path, {}), SETTINGS) is not None


def test_those_of_another_bank_are_not_read(tmp_path: Path) -> None:
    write_latest(tmp_path, made())
    other = filled().bank.contents.settings
    object.__setattr__(other, "dim", 5)
    assert read_latest(tmp_path, other) is None


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_latest(tmp_path, made())
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    assert read_latest(tmp_path, SETTINGS) is None


def test_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LogError, match="symbolic link"):
        read_latest(tmp_path, SETTINGS)
    with pytest.raises(LogError, match="symbolic link"):
        write_latest(tmp_path, made())
