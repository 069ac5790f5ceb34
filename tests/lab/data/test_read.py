"""The registry: every data set by its name, and a sentence that helps where one is missing."""

from pathlib import Path

import pytest
import torch
from pictures import idx, plant

from adanpc.lab.data import READERS, DataError, read
from adanpc.lab.data.cifar import CLASSES

NAMES = (
    "rotated-mnist", "pacs", "vlcs", "terra-incognita", "domain-net", "office-home", "folder", "manifest", "cifar-10",
    "cifar-10-c", "imagenet", "imagenet-c",
)  # fmt: skip
FOLDERS = {
    "pacs": [f"PACS/{name}" for name in ("art_painting", "cartoon", "photo", "sketch")],
    "vlcs": [f"VLCS/{name}" for name in ("Caltech101", "LabelMe", "SUN09", "VOC2007")],
    "terra-incognita": [f"terra_incognita/location_{number}" for number in (38, 43, 46, 100)],
    "domain-net": [
        f"domain_net/{name}" for name in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    ],
    "office-home": [f"office_home/{name}" for name in ("Art", "Clipart", "Product", "Real World")],
    "folder": ["one", "two"],
    "imagenet": ["ImageNet/val"],
    "imagenet-c": ["ImageNet-C/weather/fog/5", "ImageNet-C/weather/snow/1"],
    "cifar-10": ["CIFAR-10/train", "CIFAR-10/test"],
    "cifar-10-c": ["CIFAR-10/train", "CIFAR-10/test"],
}
LABELS = {"cifar-10": CLASSES, "cifar-10-c": CLASSES, "imagenet": ("n00000001", "n00000002")}


def lay(name: str, root: Path) -> Path:
    """A small copy in the layout that the message for a missing one describes, and where to read it."""
    if name == "rotated-mnist":
        images = torch.arange(12 * 784).reshape(12, 28, 28) % 256
        labels = torch.arange(12) % 10
        (root / "MNIST").mkdir()
        for part in ("train", "t10k"):
            (root / f"MNIST/{part}-images-idx3-ubyte").write_bytes(idx(images))
            (root / f"MNIST/{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    classes = LABELS.get(name, ("cat", "dog"))
    for folder in FOLDERS.get(name, ()):
        plant(root, {f"{folder}/{label}": 2 for label in classes})
    if name != "manifest":
        return root
    plant(root, {"images": 2})
    (root / "list.csv").write_text("path,label,domain\nimages/000.png,cat,day\nimages/001.png,dog,night\n")
    return root / "list.csv"


def test_the_names() -> None:
    assert tuple(READERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_reader_gives_sound_domains(name: str, tmp_path: Path) -> None:
    root = lay(name, tmp_path)
    data = read(name, root)
    again = read(name, str(root))
    assert data.name == name
    assert data.digest() == again.digest()
    assert len({domain.name for domain in data.domains}) == len(data.domains)
    for domain in data.domains:
        assert len(domain) == len(domain.images) > 0
        assert domain.labels.dtype == torch.int64
        assert 0 <= domain.labels.min() <= domain.labels.max() < len(data.classes)
    last = data.domains[-1]
    pixels = last.images[0]
    if pixels.dtype == torch.uint8:
        pixels = pixels.float() / 255
    assert torch.equal(last.take([0])[0], pixels)


def test_an_unknown_name_gets_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"unknown data set 'PACS'; did you mean 'pacs'. Available: {', '.join(NAMES)}"):
        read("PACS", tmp_path)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rotated-mnist"])
@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_missing_data_set_gets_one_sentence(name: str, folder: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(name, tmp_path / folder)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} is not at {str(tmp_path / folder)!r}: ")
    assert name == "manifest" or "<" in sentence  # the layout
    assert name in ("folder", "manifest") or "http" in sentence
    assert "\n" not in sentence
    assert ". " not in sentence


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in ("folder", "cifar-10-c")])
def test_the_sentence_names_the_folder_in_which_the_data_are_found(name: str) -> None:
    assert f" {FOLDERS[name][0].split('/')[0]}/" in READERS[name].remedy
