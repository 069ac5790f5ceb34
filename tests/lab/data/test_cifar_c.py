"""CIFAR-10-C: published arrays row by row, or the same conditions made of CIFAR-10."""

import pickle
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import noise, paint

from adanpc.lab.data import DataError, read
from adanpc.lab.data.corruptions import CORRUPTIONS, EXTRA, corrupt
from adanpc.lab.seeds import seed_of

COUNT = 3  # images at each severity
SEVERITIES = (1, 2, 3, 4, 5)
ALL = (*CORRUPTIONS, *EXTRA)


def pixels(corruption: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    rng = np.random.default_rng(ALL.index(corruption))
    return rng.integers(0, 256, (5 * COUNT, 32, 32, 3), dtype=np.uint8)


def lay(folder: Path, corruptions: tuple[str, ...] = ALL) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "labels.npy", np.tile(np.arange(COUNT, dtype=np.uint8), 5))
    for corruption in corruptions:
        np.save(folder / f"{corruption}.npy", pixels(corruption))


@pytest.mark.parametrize("folder", [".", "CIFAR-10-C"])
def test_each_condition_is_a_domain(folder: str, tmp_path: Path) -> None:
    lay(tmp_path / folder)
    data = read("cifar-10-c", tmp_path)
    assert [domain.name for domain in data.domains] == [f"{name}-{severity}" for name in ALL for severity in SEVERITIES]
    for name, severity in (("gaussian_noise", 1), ("fog", 5), ("saturate", 3)):
        expected = pixels(name)[(severity - 1) * COUNT : severity * COUNT].transpose(0, 3, 1, 2)
        domain = data[f"{name}-{severity}"]
        assert torch.equal(domain.take(range(COUNT)), torch.from_numpy(expected) / 255)
        assert domain.labels.tolist() == [0, 1, 2]
        assert len(domain.images) == COUNT
    assert (data.name, data.notice, len(data.classes)) == ("cifar-10-c", "", 10)


def test_a_domain_ends_where_its_severity_ends(tmp_path: Path) -> None:
    lay(tmp_path, ("fog",))
    images = read("cifar-10-c", tmp_path)["fog-2"].images
    assert torch.equal(images[-1], images[COUNT - 1])
    with pytest.raises(IndexError):
        images[COUNT]


def test_a_part_of_the_data_is_read_and_said_to_be_one(tmp_path: Path) -> None:
    lay(tmp_path, ("fog", "snow", "spatter"))
    data = read("cifar-10-c", tmp_path)
    assert [domain.name for domain in data.domains[::5]] == ["snow-1", "fog-1", "spatter-1"]
    assert data.notice == "10 of the 75 standard domains are in this copy"


def test_arrays_are_never_read_whole(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.zeros(50_000, dtype=np.uint8))
    shape = (50_000, 32, 32, 3)
    array = np.lib.format.open_memmap(tmp_path / "fog.npy", mode="w+", dtype=np.uint8, shape=shape)  # 150 MB of holes
    array[49_999, 1, 2] = (7, 8, 9)
    del array
    tracemalloc.start()
    domain = read("cifar-10-c", tmp_path)["fog-5"]
    image = domain.images[9_999]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert image[:, 1, 2].tolist() == [7, 8, 9]
    assert peak < 5e6
    assert len(pickle.dumps(domain.images)) < 1000
    assert torch.equal(pickle.loads(pickle.dumps(domain.images))[9_999], image)


def test_the_digest_changes_with_the_file_and_the_severity(tmp_path: Path) -> None:
    lay(tmp_path, ("fog",))
    before = read("cifar-10-c", tmp_path)
    np.save(tmp_path / "fog.npy", np.zeros((5 * COUNT, 30, 32, 3), dtype=np.uint8))
    after = read("cifar-10-c", tmp_path)
    assert len({data[f"fog-{severity}"].digest() for data in (before, after) for severity in SEVERITIES}) == 10


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("fog", np.zeros((14, 32, 32, 3), np.uint8), r"holds uint8 \(14, 32, 32, 3\) where uint8 \(15, 32, 32, 3\)"),
        ("fog", np.zeros((15, 32, 32, 3)), r"holds float64 \(15, 32, 32, 3\) where uint8"),
        ("fog", np.zeros((15, 3, 32, 32), np.uint8), r"holds uint8 \(15, 3, 32, 32\) where"),
        ("fog", np.array([{}] * 15), r"is not an array \(.*: unpack it again"),
        ("labels", np.zeros(14), "holds no labels 0 to 9 for 5 severities: unpack it again"),
        ("labels", np.full(15, 10), "holds no labels 0 to 9"),
        ("labels", np.full(15, 0.5), "holds no labels 0 to 9"),
        ("labels", np.zeros((15, 1)), "holds no labels 0 to 9"),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    file: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], message: str, tmp_path: Path
) -> None:
    lay(tmp_path, ("fog",))
    np.save(tmp_path / f"{file}.npy", values)
    with pytest.raises(DataError, match=rf"{file}\.npy' {message}"):
        read("cifar-10-c", tmp_path)


@pytest.mark.parametrize("keep", [0, 60, 1000])
def test_a_cut_array_is_named(keep: int, tmp_path: Path) -> None:
    lay(tmp_path, ("fog",))
    (tmp_path / "fog.npy").write_bytes((tmp_path / "fog.npy").read_bytes()[:keep])
    with pytest.raises(DataError, match=r"fog\.npy' is not an array"):
        read("cifar-10-c", tmp_path)


def test_missing_labels_are_named(tmp_path: Path) -> None:
    lay(tmp_path, ("fog",))
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels\.npy' is missing beside the corrupted images"):
        read("cifar-10-c", tmp_path)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """CIFAR-10 as files: two images a class."""
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    for row in range(20):
        paint(tmp_path / "CIFAR-10/test" / classes[row // 2] / f"{row:02}.png", row, 32, 32)
        paint(tmp_path / "CIFAR-10/train" / classes[row // 2] / f"{row:02}.png", row, 32, 32)
    return tmp_path


@pytest.mark.parametrize(("name", "severity"), [("gaussian_noise", 3), ("contrast", 1), ("spatter", 5)])
def test_without_the_arrays_the_images_are_made(name: str, severity: int, clean: Path) -> None:
    data = read("cifar-10-c", clean, seed=6)
    got = data[f"{name}-{severity}"].take([7, 2])
    for image, row in zip(got, (7, 2), strict=True):
        rng = np.random.default_rng(seed_of(6, name, severity, row))
        assert torch.equal(image, corrupt(noise(row, 32, 32) / 255, name, severity, rng))
    assert data[f"{name}-{severity}"].labels.tolist() == [row // 2 for row in range(20)]
    assert len(data.domains) == 95
    assert data.notice.startswith("made here, since the published files are missing; ")


def test_nothing_is_made_of_training_images(clean: Path) -> None:
    shutil.rmtree(clean / "CIFAR-10" / "test")
    with pytest.raises(DataError, match="cifar-10-c is not at"):
        read("cifar-10-c", clean)


def test_a_made_image_depends_on_seed_and_row_alone(clean: Path) -> None:
    domain = read("cifar-10-c", clean, seed=0)["shot_noise-4"]
    other = read("cifar-10-c", clean, seed=1)["shot_noise-4"]
    all_at_once = domain.take(range(20))
    assert torch.equal(domain.subset([9, 4]).take([0, 1]), all_at_once[[9, 4]])
    assert torch.equal(domain.take([3]), all_at_once[3:4])
    assert not torch.equal(other.take([3]), all_at_once[3:4])
    assert len({domain.digest(), other.digest(), domain.subset([0]).digest()}) == 3


def test_made_conditions_have_different_digests(clean: Path) -> None:
    domains = read("cifar-10-c", clean).domains
    assert len({domain.version for domain in domains}) == len({domain.digest() for domain in domains}) == 95


def test_the_digest_of_made_images_changes_with_the_clean_ones(clean: Path) -> None:
    before = read("cifar-10-c", clean)["fog-1"].digest()
    paint(clean / "CIFAR-10/test/dog/10.png", 77, 32, 31)
    assert read("cifar-10-c", clean)["fog-1"].digest() != before
