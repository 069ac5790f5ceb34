"""CIFAR-10: batches as they were published, image files, and files that are not to be trusted."""

import os
import pickle
import struct
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, cast
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from pictures import noise, plant

from adanpc.lab.data import DataError, DataSet, read
from adanpc.lab.data.cifar import BATCHES, CLASSES, read_batch

BATCH = 4
NAMES = [name for names in BATCHES.values() for name in names]
COUNTS = "20 train images where 50,000 are published; 4 test images where 10,000 are published"


class OldPickler(pickle._Pickler):
    """Writes texts and bytes as Python 2 did, which wrote the published files."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_old(self, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        cast(Any, self).write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)

    dispatch[str] = dispatch[bytes] = save_old


def pickled(content: object) -> bytes:
    file = BytesIO()
    OldPickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def batch(number: int, count: int = BATCH) -> dict[str, Any]:
    images = torch.stack([noise(100 * number + row, 32, 32) for row in range(count)])
    labels = [(number + row) % 10 for row in range(count)]
    return {"data": images.flatten(1).numpy(), "labels": labels, "batch_label": "a batch", "filenames": ["x.png"]}


def lay(folder: Path) -> None:
    """Writes all six batches."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(pickled(batch(number)))


def check_batches(data: DataSet) -> None:
    assert [domain.name for domain in data.domains] == ["train", "test"]
    assert data["train"].labels.tolist() == [(number + row) % 10 for number in range(5) for row in range(BATCH)]
    assert data["test"].labels.tolist() == [5, 6, 7, 8]
    assert torch.equal(data["train"].take([9])[0], noise(201, 32, 32) / 255)
    assert torch.equal(data["test"].take([1])[0], noise(501, 32, 32) / 255)
    assert (data.name, data.classes, data.notice) == ("cifar-10", CLASSES, COUNTS)


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-py", "CIFAR-10", "cifar10/cifar-10-batches-py"])
def test_batches_are_found_at_the_root_and_below(folder: str, tmp_path: Path) -> None:
    lay(tmp_path / folder)
    check_batches(read("cifar-10", tmp_path))


def test_the_batches_of_the_test_are_those_of_python_2(tmp_path: Path) -> None:
    lay(tmp_path)
    content = (tmp_path / "test_batch").read_bytes()
    assert b"cnumpy.core.multiarray\n_reconstruct" in content
    assert set(pickle.loads(content, encoding="bytes", fix_imports=False)) >= {b"data", b"labels"}


def test_batches_of_today_are_read_too(tmp_path: Path) -> None:
    today = {key.encode(): value for key, value in batch(3).items()}
    (tmp_path / "batch").write_bytes(pickle.dumps(today))
    images, labels = read_batch(tmp_path / "batch")
    assert torch.equal(images[2], noise(302, 32, 32))
    assert labels.tolist() == [3, 4, 5, 6]


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_batch_that_would_run_code_is_refused(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": Attack(mark), "labels": [1]}, protocol=protocol))
    with pytest.raises(DataError, match=r"batch' is not a batch of CIFAR-10 \(it asks for \w+\.mkdir, as no batch"):
        read_batch(tmp_path / "batch")
    assert not mark.exists()


@pytest.mark.parametrize("name", [("numpy", "load"), ("builtins", "eval"), ("numpy", "ndarray.tofile")])
def test_no_other_function_may_be_asked_for(name: tuple[str, str], tmp_path: Path) -> None:
    module, function = name
    content = pickle.PROTO + b"\4"
    for text in (module, function):
        content += pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()
    content += pickle.STACK_GLOBAL + pickle.STOP
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(DataError, match=f"it asks for {module}.{function}"):
        read_batch(tmp_path / "batch")


def spoiled(**changed: object) -> bytes:
    """A batch with other fields than it should have."""
    return pickled({**batch(0), **changed})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        pickled(batch(0))[:-50],
        pickled([1, 2]),
        pickled({"labels": [1]}),
        spoiled(labels=[1, 2, 3]),
        spoiled(labels=[1, 2, 3, 10]),
        spoiled(labels=[1, 2, 3, -1]),
        spoiled(labels=["a", "b", "c", "d"]),
        spoiled(labels=7),
        spoiled(data=np.zeros((4, 3072))),
        spoiled(data=np.zeros((4, 3071), dtype=np.uint8)),
        spoiled(data="text"),
    ],
)
def test_what_is_no_batch_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_1' (is not a batch|holds no images).*: unpack it again"):
        read_batch(tmp_path / "data_batch_1")


def test_missing_batches_are_named(tmp_path: Path) -> None:
    lay(tmp_path)
    (tmp_path / "data_batch_3").unlink()
    (tmp_path / "data_batch_5").unlink()
    with pytest.raises(DataError, match="lacks data_batch_3, data_batch_5: unpack the archive again"):
        read("cifar-10", tmp_path)


def test_batches_of_the_test_alone_are_read_and_said_to_be_a_part(tmp_path: Path) -> None:
    lay(tmp_path)
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}").unlink()
    check_part(read("cifar-10", tmp_path))


def plant_cifar(root: Path) -> list[Path]:
    """Two images of each class in train, and one in test."""
    counts = {f"train/{label}": 2 for label in CLASSES}
    counts.update({f"test/{label}": 1 for label in CLASSES})
    return plant(root, counts)


def check_files(data: DataSet) -> None:
    assert data["train"].labels.tolist() == [label for label in range(10) for _ in range(2)]
    assert data["test"].labels.tolist() == list(range(10))
    assert torch.equal(data["train"].take([5])[0], noise(5) / 255)
    assert torch.equal(data["test"].take([3])[0], noise(23) / 255)
    assert data.classes == CLASSES
    assert data.notice.startswith("20 train images where 50,000")


@pytest.mark.parametrize("folder", [".", "CIFAR-10"])
def test_class_folders_are_read(folder: str, tmp_path: Path) -> None:
    plant_cifar(tmp_path / folder)
    check_files(read("cifar-10", tmp_path))


def pack(root: Path, path: Path, prefix: str = "") -> None:
    with ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "images of CIFAR-10")
        for file in reversed(plant_cifar(root)):
            archive.write(file, prefix + file.relative_to(root).as_posix())


@pytest.mark.parametrize("prefix", ["", "CIFAR-10-images-master/"])
def test_a_zip_file_of_class_folders_is_read(prefix: str, tmp_path: Path) -> None:
    pack(tmp_path / "unpacked", tmp_path / "cifar10-jpeg.zip", prefix)
    (tmp_path / "other.zip").write_bytes(b"none of ours, so never opened")
    check_files(read("cifar-10", tmp_path))


def test_the_digest_of_a_zip_file_changes_with_an_image_alone(tmp_path: Path) -> None:
    digests = []
    for spoil in (b"1", b"1", b"2"):
        pack(tmp_path / "unpacked", tmp_path / "cifar.zip")
        with ZipFile(tmp_path / "cifar.zip", "a") as archive:
            archive.writestr("test/truck/9.png", spoil)
        digests.append(read("cifar-10", tmp_path).digest())
    assert digests[0] == digests[1] != digests[2]


def test_other_classes_are_refused(tmp_path: Path) -> None:
    plant(tmp_path, {f"{part}/{label}": 1 for part in BATCHES for label in (*CLASSES[1:], "zebra")})
    with pytest.raises(DataError, match=r"has other classes in train than airplane, .* truck: copy it again"):
        read("cifar-10", tmp_path)


def check_part(data: DataSet) -> None:
    assert [domain.name for domain in data.domains] == ["test"]
    assert data.notice.startswith("0 train images where 50,000 are published; ")


def test_images_of_the_test_alone_are_read_and_said_to_be_a_part(tmp_path: Path) -> None:
    files = plant(tmp_path / "CIFAR-10", {f"test/{label}": 1 for label in CLASSES})
    check_part(read("cifar-10", tmp_path))
    (tmp_path / "zip").mkdir()
    with ZipFile(tmp_path / "zip" / "cifar.zip", "w") as archive:
        for file in files:
            archive.write(file, file.relative_to(tmp_path).as_posix())
    check_part(read("cifar-10", tmp_path / "zip"))


def test_a_broken_zip_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar10.zip").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(DataError, match=r"cifar10\.zip' cannot be read \(File is not a zip file\): copy it again"):
        read("cifar-10", tmp_path)


def test_a_zip_file_of_something_else_is_not_taken_for_it(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "cifar-weights.zip", "w") as archive:
        archive.writestr("weights/resnet.th", "x")
    with pytest.raises(DataError, match=r"cifar-10 is not at .*www\.cs\.toronto\.edu/~kriz/cifar\.html"):
        read("cifar-10", tmp_path)


def test_lack_of_memory_is_not_blamed_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(values: object, dtype: object) -> None:
        raise MemoryError

    (tmp_path / "batch").write_bytes(pickled(batch(0)))
    monkeypatch.setattr(np, "frombuffer", full)
    with pytest.raises(MemoryError):
        read_batch(tmp_path / "batch")
