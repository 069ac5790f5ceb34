"""Preprocessing against timm's evaluation transform on real pictures."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.networks import Preprocessing
from adanpc.lab.networks.vision import vision
from adanpc.models.recipe import describe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def as_tensor(picture: Image.Image) -> Tensor:
    pixels = torch.tensor(list(picture.tobytes()), dtype=torch.float32)
    return pixels.reshape(picture.height, picture.width, 3).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.fromarray(load_sample_image("china.jpg"))  # 640 wide, 427 high


@pytest.mark.parametrize("box", [(0, 0, 640, 427), (100, 30, 301, 330), (11, 17, 236, 416), (5, 5, 62, 105)])
@pytest.mark.parametrize(
    ("size", "crop", "squash", "interpolation"),
    [
        (224, 0.875, False, "bicubic"),
        (240, 0.882, False, "bilinear"),
        (224, 1.0, False, "bicubic"),
        (65, 0.95, True, "bilinear"),
        (96, 1.0, True, "bicubic"),
    ],
)
def test_it_is_the_transform_of_timm(
    picture: Image.Image, box: tuple[int, int, int, int], size: int, crop: float, squash: bool, interpolation: str
) -> None:
    picture = picture.crop(box)
    theirs = vision().data.create_transform(
        input_size=(3, size, size),
        crop_pct=crop,
        crop_mode="squash" if squash else "center",
        interpolation=interpolation,
        mean=MEAN,
        std=STD,
    )(picture)
    made = Preprocessing(size, crop, squash, interpolation, MEAN, STD)(as_tensor(picture))
    levels = (made - theirs).abs() * torch.tensor(STD)[:, None, None] * 255  # PIL rounds to bytes, twice
    assert made.shape == (3, size, size)
    assert levels.mean() < 0.5
    assert levels.max() < 8


def test_a_batch_is_its_images(picture: Image.Image) -> None:
    images = torch.stack([as_tensor(picture), as_tensor(picture).flip(-1)])
    preprocessing = Preprocessing(64, 0.9, False, "bilinear", MEAN, STD)
    torch.testing.assert_close(preprocessing(images), torch.stack([preprocessing(image) for image in images]))


def test_without_settings_nothing_is_changed() -> None:
    images = torch.rand(2, 5, 7, 9)
    assert torch.equal(Preprocessing()(images), images)
    assert torch.equal(Preprocessing(size=32)(images := torch.rand(3, 32, 32)), images)


def test_results_of_resizing_are_colors() -> None:
    stripes = torch.zeros(3, 40, 40)
    stripes[:, :, ::8] = 1
    made = Preprocessing(size=100)(stripes)  # bicubic overshoots
    assert made.min() == 0
    assert made.max() <= 1


def test_normalizing_is_by_channel() -> None:
    image = torch.tensor([0.2, 0.4, 0.6])[:, None, None].expand(3, 2, 2)
    made = Preprocessing(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))(image)
    torch.testing.assert_close(made[:, 0, 0], torch.tensor([0.2, 0.8, 0.3]))


def test_gray_images_become_color_images_if_the_model_takes_color() -> None:
    gray, preprocessing = torch.rand(2, 1, 8, 8), Preprocessing(mean=MEAN, std=STD)
    torch.testing.assert_close(preprocessing(gray), preprocessing(gray.repeat(1, 3, 1, 1)))
    torch.testing.assert_close(preprocessing(gray[0]), preprocessing(gray[0].repeat(3, 1, 1)))


def test_color_is_refused_where_gray_is_wanted_and_alpha_where_color_is() -> None:
    with pytest.raises(AdaNPCError, match="must have 3 channels, got 4; convert them"):
        Preprocessing(mean=MEAN, std=STD)(torch.rand(4, 8, 8))
    with pytest.raises(AdaNPCError, match="must have 1 channels, got 3"):
        Preprocessing(mean=(0.5,), std=(0.5,))(torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize(
    "images", [torch.zeros(3, 8, 8, dtype=torch.uint8), torch.rand(8, 8), torch.rand(1, 2, 3, 8, 8)]
)
def test_what_is_no_image_is_refused(images: Tensor) -> None:
    with pytest.raises(AdaNPCError, match=r"images must be floats \(C, H, W\)"):
        Preprocessing()(images)


def test_other_channels_get_the_average() -> None:
    preprocessing = Preprocessing(mean=(0.2, 0.4, 0.6), std=(0.1, 0.2, 0.3))
    assert preprocessing.for_channels(3) is preprocessing
    gray = preprocessing.for_channels(1)
    torch.testing.assert_close(torch.tensor([gray.mean, gray.std]), torch.tensor([[0.4], [0.2]]))
    assert Preprocessing().for_channels(7) == Preprocessing()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"crop": 0.0}, "crop must be above 0 and at most 1, got 0.0"),
        ({"crop": 1.5}, "crop must be above 0 and at most 1, got 1.5"),
        ({"interpolation": "nearest"}, "one of bilinear, bicubic, got 'nearest'"),
        ({"mean": (0.5,)}, "mean and std must be of the same channels"),
        ({"mean": (0.5,), "std": (0.0,)}, "std above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        Preprocessing(**settings)  # type: ignore[arg-type]


def test_it_is_a_value() -> None:
    one, same = (Preprocessing(224, 0.875, False, "bilinear", MEAN, STD) for _ in range(2))
    assert one == same
    assert describe(one) == describe(same) == repr(one)
    assert describe(Preprocessing(225)) != describe(Preprocessing(224))


def test_a_straight_resize_is_that_of_domainbed(picture: Image.Image) -> None:
    """``transforms.Resize((224, 224))``: the whole picture becomes the square, and nothing is cropped."""
    cropping = Preprocessing(224, crop=0.875, squash=False, interpolation="bilinear", mean=MEAN, std=STD)
    made = cropping.straight()(as_tensor(picture))
    resized = as_tensor(picture.resize((224, 224), Image.Resampling.BILINEAR))
    expected = (resized - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    assert (made - expected).abs().max() < 1.5 / 255 / min(STD)  # PIL rounds to bytes
    assert not torch.allclose(made, cropping(as_tensor(picture)), atol=0.1)
