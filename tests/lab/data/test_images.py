"""Images in files: what is on disk is what one gets, and what cannot be read is named."""

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import pytest
import torch
from pictures import noise, paint, plant
from PIL import Image
from torch.utils.data import DataLoader

from adanpc.lab.data import DataError, DataSet, Domain, ImageFiles, images, unreadable, without
from adanpc.lab.data.contents import read_contents
from adanpc.lab.data.corrupted import Corrupted
from adanpc.lab.data.domain import join
from adanpc.lab.data.loading import Chunks

NAMES = ["a/0.png", "a/1.png", "b/0.png"]


def zipped(root: Path, path: Path, names: list[str]) -> Path:
    with ZipFile(path, "w") as archive:
        for name in names:
            archive.write(root / name, name)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> ImageFiles:
    for seed, name in enumerate(NAMES):
        paint(tmp_path / name, seed, height=4 + seed)
    return ImageFiles(tmp_path, NAMES)


def test_the_pixels_are_those_of_the_files(folder: ImageFiles) -> None:
    assert len(folder) == 3
    for seed in range(3):
        assert torch.equal(folder[seed], noise(seed, height=4 + seed))
    assert folder[0].dtype == torch.uint8


def test_a_zip_file_gives_what_its_folder_gives(folder: ImageFiles, tmp_path: Path) -> None:
    archive = ImageFiles(zipped(tmp_path, tmp_path / "all.zip", NAMES), NAMES)
    assert all(torch.equal(archive[row], folder[row]) for row in range(3))
    assert archive.file(2) == f"{tmp_path}/all.zip/b/0.png"


def test_iterating_ends(folder: ImageFiles) -> None:
    assert [image.shape[1] for image in folder] == [4, 5, 6]  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_kind_of_image_becomes_rgb(mode: str, tmp_path: Path) -> None:
    original = Image.fromarray(noise(3).permute(1, 2, 0).contiguous().numpy()).convert(mode)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    original.save(path)
    expected = torch.tensor([original.convert("RGB").getpixel((x, y)) for y in range(9) for x in range(8)])
    got = ImageFiles(tmp_path, [path.name])[0]
    assert torch.equal(got.permute(1, 2, 0).reshape(-1, 3).long(), expected)


def test_a_transparent_palette_is_read_without_a_warning(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "image.png", transparency=bytes([0, 128]))
    assert ImageFiles(tmp_path, ["image.png"])[0].permute(1, 2, 0).tolist() == [[[255, 0, 0], [0, 0, 255]]]


NAMED = ["ü ñ 犬.png", *(["\udce9.png"] if sys.platform == "linux" else [])]  # the last is no UTF-8


@pytest.mark.parametrize("name", NAMED)
def test_unusual_names_are_found(name: str, tmp_path: Path) -> None:
    paint(tmp_path / name, 4)
    assert torch.equal(ImageFiles(tmp_path, [name])[0], noise(4))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILERS: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("<html>404</html>"),
    "missing": Path.unlink,
    "folder": replace_by_folder,
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS.keys())
def test_what_cannot_be_read_is_named_with_a_remedy(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    paint(tmp_path / "photo.jpg", height=40, width=40)
    spoil(tmp_path / "photo.jpg")
    with pytest.raises(DataError, match=r"photo\.jpg' cannot be read .*copy it again, or use `skip_unreadable`"):
        ImageFiles(tmp_path, ["photo.jpg"])[0]


def test_a_flipped_byte_in_a_zip_file_is_noticed(tmp_path: Path) -> None:
    plant(tmp_path, {"a": 1})
    path = zipped(tmp_path, tmp_path / "all.zip", ["a/000.png"])
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"all\.zip/a/000\.png' cannot be read \(Bad CRC-32"):
        ImageFiles(path, ["a/000.png"])[0]


def test_a_zip_file_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    paint(tmp_path / "one.png", 1)
    files = ImageFiles(zipped(tmp_path, tmp_path / "all.zip", ["one.png"]), ["one.png"])
    assert torch.equal(files[0], noise(1))
    paint(tmp_path / "one.png", 2)
    zipped(tmp_path, tmp_path / "new.zip", ["one.png"]).replace(tmp_path / "all.zip")
    os.utime(tmp_path / "all.zip", ns=(1, 1))  # two writes may fall into one tick of the clock
    assert torch.equal(files[0], noise(2))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_share_a_zip_file(method: str, tmp_path: Path) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    count = 400 if method == "fork" else 20
    names = [path.relative_to(tmp_path).as_posix() for path in plant(tmp_path, {"a": count})]
    with ZipFile(tmp_path / "all.zip", "w", ZIP_STORED) as archive:
        for name in names:
            archive.write(tmp_path / name, name)
    domain = Domain("all", ImageFiles(tmp_path / "all.zip", names), torch.arange(len(names)))
    first = domain.take([0])  # the parent has it open when it forks
    workers = 2 if method == "fork" else 1
    loader = DataLoader(Chunks(domain, 4), batch_size=None, num_workers=workers, multiprocessing_context=method)
    got = torch.cat([batch for batch, _ in loader])
    assert torch.equal(got[:1], first)
    assert torch.equal((got * 255).round().byte(), torch.stack([noise(seed) for seed in range(len(names))]))


def test_a_pickle_holds_names_and_no_images(folder: ImageFiles, tmp_path: Path) -> None:
    path = zipped(tmp_path, tmp_path / "all.zip", NAMES)
    files = ImageFiles(path, NAMES)
    files[0]
    text = pickle.dumps(files)
    assert len(text) < 1000
    assert torch.equal(pickle.loads(text)[2], folder[2])


@pytest.fixture
def spoiled(tmp_path: Path) -> DataSet:
    """Two domains of 40 images; the third and the last of the first, and the first of the second cannot be read."""
    names = [path.relative_to(tmp_path).as_posix() for path in plant(tmp_path, {"a": 40, "b": 40})]
    for name in (names[2], names[39], names[40]):
        (tmp_path / name).write_bytes(b"no image")
    labels = torch.arange(40)
    first = Domain("a", ImageFiles(tmp_path, names[:40]), labels, version="a")
    second = Domain("b", ImageFiles(tmp_path, names[40:]), labels, version="b")
    return DataSet("spoiled", (first, second), tuple(str(label) for label in range(40)), "it is small")


def bad(root: Path, *names: str) -> tuple[str, ...]:
    return tuple(f"{root}/{name}" for name in names)


def test_unreadable_files_are_listed(spoiled: DataSet, tmp_path: Path) -> None:
    assert unreadable(spoiled) == bad(tmp_path, "a/002.png", "a/039.png", "b/000.png")
    assert unreadable(spoiled["b"]) == bad(tmp_path, "b/000.png")


def test_unreadable_files_are_found_behind_subsets_and_corruptions(spoiled: DataSet, tmp_path: Path) -> None:
    domain = spoiled["a"].subset([5, 2, 7]).subset([1, 0])
    assert unreadable(domain) == bad(tmp_path, "a/002.png")
    assert unreadable(Domain("fog", Corrupted(domain.images, "fog", 1, 0), domain.labels)) == unreadable(domain)


def test_unreadable_files_are_found_behind_joined_domains(spoiled: DataSet, tmp_path: Path) -> None:
    memory = Domain("memory", torch.zeros(3, 3, 9, 8), torch.zeros(3).long())
    joined = join("all", [memory, spoiled["b"], spoiled["a"]]).subset([0, 3, 4, 45, 82])
    assert unreadable(joined) == bad(tmp_path, "b/000.png", "a/002.png", "a/039.png")
    sound = without(DataSet("joined", (joined,), spoiled.classes), unreadable(joined))
    assert torch.equal(sound.domains[0].take([0, 1]), torch.stack([torch.zeros(3, 9, 8), noise(41) / 255]))


def test_each_file_is_read_once(spoiled: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(path: str) -> bytes:
        read.append(path)
        return read_contents(path)

    monkeypatch.setattr(images, "read_contents", noted)
    half = spoiled["a"].subset(range(20))
    assert len(unreadable(DataSet("twice", (half, spoiled["a"], half), spoiled.classes))) == 2
    assert len(read) == len(set(read)) == 40


def test_images_in_memory_are_readable() -> None:
    assert unreadable(Domain("memory", torch.zeros(2, 3, 4, 4), torch.zeros(2).long())) == ()


def test_files_are_dropped_on_request_alone_and_counted(spoiled: DataSet) -> None:
    sound = without(spoiled, unreadable(spoiled))
    assert [len(domain) for domain in sound.domains] == [38, 39]
    assert sound["a"].labels.tolist() == [row for row in range(40) if row not in (2, 39)]
    assert torch.equal(sound["a"].take([2])[0], noise(3) / 255)
    assert torch.equal(sound["b"].take([0])[0], noise(41) / 255)
    assert unreadable(sound) == ()
    assert sound.notice == "it is small; 3 images were dropped by request"
    assert len({sound["a"].digest(), spoiled["a"].digest()}) == 2
    assert [len(domain) for domain in spoiled.domains] == [40, 40]


def test_dropping_nothing_changes_nothing(spoiled: DataSet) -> None:
    same = without(spoiled, ())
    assert (same.digest(), same.notice) == (spoiled.digest(), spoiled.notice)
    memory = DataSet("memory", (Domain("m", torch.zeros(2, 3, 4, 4), torch.zeros(2).long()),), ("a",))
    assert without(memory, ()).domains == memory.domains


def test_a_file_that_is_not_there_cannot_be_dropped(spoiled: DataSet) -> None:
    with pytest.raises(
        DataError, match="spoiled has no file 'a/002.png': give the paths as adanpc.lab.data.unreadable does"
    ):
        without(spoiled, ["a/002.png"])


def test_without_pillow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "Image", None)
    with pytest.raises(DataError, match=r"pillow.*pip install 'adanpc\[vision\]'"):
        ImageFiles(tmp_path, [])


def test_lack_of_memory_is_not_blamed_on_the_file(folder: ImageFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(content: object) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        raise MemoryError

    monkeypatch.setattr(images, "_decode", full)
    with pytest.raises(MemoryError):
        folder[0]
