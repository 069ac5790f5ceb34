"""ImageNet and ImageNet-C: published folders in both arrangements, or made of val."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import noise, paint, plant
from PIL import Image

from adanpc.lab.data import DataError, read
from adanpc.lab.data.corruptions import CORRUPTIONS, EXTRA, corrupt
from adanpc.lab.data.imagenet import Cropped
from adanpc.lab.seeds import seed_of

GROUPS = {"noise": "gaussian_noise", "blur": "zoom_blur", "weather": "fog", "digital": "contrast", "extra": "spatter"}
CLASSES = "2 classes where 1,000 are published"


@pytest.mark.parametrize("folder", [".", "ImageNet", "ILSVRC/Data/CLS-LOC"])
def test_train_and_val_are_domains(folder: str, tmp_path: Path) -> None:
    counts = {"val/n02000000": 1, "val/n01000000": 2, "train/n02000000": 3, "train/n01000000": 1}
    plant(tmp_path / folder, counts, ".JPEG")
    data = read("imagenet", tmp_path)
    assert data.classes == ("n01000000", "n02000000")
    assert {domain.name: domain.labels.tolist() for domain in data.domains} == {"train": [0, 1, 1, 1], "val": [0, 0, 1]}
    sizes = "4 train images where 1,281,167 are published; 3 val images where 50,000 are published"
    assert (data.name, data.notice) == ("imagenet", f"{sizes}; {CLASSES}")


def test_val_alone_will_do(tmp_path: Path) -> None:
    plant(tmp_path, {"val/n02000000": 2})
    assert [domain.name for domain in read("imagenet", tmp_path).domains] == ["val"]


def test_images_that_are_not_sorted_into_classes_are_named(tmp_path: Path) -> None:
    paint(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(
        DataError, match=r"00001\.JPEG' is not in the folder of a class: images are expected in val/<class>/<image>"
    ):
        read("imagenet", tmp_path)


def test_any_val_folder_is_not_imagenet(tmp_path: Path) -> None:
    plant(tmp_path, {"val/dog": 2})
    with pytest.raises(DataError, match=r"imagenet is not at .*https://image-net\.org/"):
        read("imagenet", tmp_path)


@pytest.mark.parametrize("folder", [".", "ImageNet-C"])
@pytest.mark.parametrize("grouped", [True, False])
def test_each_condition_is_a_domain(folder: str, grouped: bool, tmp_path: Path) -> None:
    heads = [f"{group}/{name}" if grouped else name for group, name in GROUPS.items()]
    counts = {}
    for head in heads:
        for severity in (1, 5):
            counts[f"{head}/{severity}/n01000000"] = 1
            counts[f"{head}/{severity}/n02000000"] = 2
    paths = plant(tmp_path / folder, counts, ".png")
    data = read("imagenet-c", tmp_path)
    names = [f"{name}-{severity}" for name in GROUPS.values() for severity in (1, 5)]
    assert [domain.name for domain in data.domains] == [
        "gaussian_noise-1", "gaussian_noise-5", "zoom_blur-1", "zoom_blur-5", "fog-1", "fog-5", "contrast-1",
        "contrast-5", "spatter-1", "spatter-5",
    ] == names  # fmt: skip
    assert data["fog-5"].labels.tolist() == [0, 1, 1]
    fog = paths.index(tmp_path / folder / heads[2] / "5" / "n01000000" / "000.png")
    assert torch.equal(data["fog-5"].take([0])[0], noise(fog) / 255)
    assert data.notice == f"8 of the 75 standard domains are in this copy; {CLASSES}"


def test_a_whole_copy_is_said_to_be_one(tmp_path: Path) -> None:
    for name in (*CORRUPTIONS, *EXTRA):
        for severity in range(1, 6):
            for number in range(2):
                folder = tmp_path / name / str(severity) / f"n0000000{number}"
                folder.mkdir(parents=True)
                (folder / "1.JPEG").write_bytes(b"")
    data = read("imagenet-c", tmp_path)
    assert len(data.domains) == 95
    assert data.notice == CLASSES


@pytest.mark.parametrize(("height", "width"), [(300, 400), (400, 300), (256, 256), (100, 333), (257, 500)])
def test_images_are_cut_as_pillow_cuts_them(height: int, width: int) -> None:
    rng = np.random.default_rng(height)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    shorter = min(height, width)
    resized = image.resize((256 * width // shorter, 256 * height // shorter), Image.Resampling.BILINEAR)
    left = round((resized.width - 224) / 2)
    top = round((resized.height - 224) / 2)
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
    got = Cropped(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])[0]
    assert got.shape == (3, 224, 224)
    assert got.dtype == torch.uint8
    assert np.abs(got.permute(1, 2, 0).numpy() - expected).max() <= 1


def test_without_the_folders_the_images_are_made_of_val(tmp_path: Path) -> None:
    for row in range(3):
        paint(tmp_path / "ImageNet/val" / f"n0000000{row % 2}" / f"{row}.png", row, 230, 260 + row)
    plant(tmp_path / "ImageNet", {"train/n00000000": 1})
    data = read("imagenet-c", tmp_path, seed=2)
    assert data["contrast-4"].labels.tolist() == [0, 0, 1]
    clean = Cropped(noise(2, 230, 262)[None])[0]  # the second of its class
    for name, severity in (("contrast", 4), ("gaussian_noise", 1)):
        rng = np.random.default_rng(seed_of(2, name, severity, 1))
        assert torch.equal(data[f"{name}-{severity}"].take([1])[0], corrupt(clean, name, severity, rng))
    assert len(data.domains) == 95
    assert data.name == "imagenet-c"
    assert data.notice.startswith("made here, since the published files are missing; ")
    assert data.notice.endswith(f"3 val images where 50,000 are published; {CLASSES}")


def test_without_val_nothing_is_made_of_train(tmp_path: Path) -> None:
    plant(tmp_path, {"train/n00000000": 1})
    with pytest.raises(DataError, match=r"imagenet-c is not at .*doi\.org/10\.5281/zenodo\.2235448"):
        read("imagenet-c", tmp_path)
