"""Augmented against torchvision's functions, and its draws against what they should be."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adanpc.lab.networks import Augmented, Preprocessing
from adanpc.lab.networks.augmentation import brightened, contrasted, cropped, gray, hue_shifted, recolored, saturated
from adanpc.lab.networks.vision import vision

PLAIN = Preprocessing(size=24)
DRAWS = 400


@pytest.fixture(scope="module")
def functional() -> Any:
    vision()
    return import_module("torchvision.transforms.functional")


def colors() -> Tensor:
    """Random colors, among them ties, grays, black and white."""
    torch.manual_seed(0)
    image = torch.rand(3, 16, 16)
    image[:, 0] = (image[:, 0] * 2).round() / 2
    image[:, 1] = image[:1, 1]
    image[:, 2, :8], image[:, 2, 8:] = 0, 1
    return image


@pytest.mark.parametrize("amount", [-0.3, -0.1, 0.0, 0.2, 0.3])
def test_colors_change_as_in_torchvision(functional: Any, amount: float) -> None:
    image = colors()
    for ours, theirs in (
        (brightened, functional.adjust_brightness),
        (contrasted, functional.adjust_contrast),
        (saturated, functional.adjust_saturation),
    ):
        torch.testing.assert_close(ours(image, 1 + amount), theirs(image, 1 + amount), rtol=0, atol=1e-5)
    torch.testing.assert_close(hue_shifted(image, amount), functional.adjust_hue(image, amount), rtol=0, atol=1e-5)
    torch.testing.assert_close(gray(image), functional.rgb_to_grayscale(image), rtol=0, atol=1e-5)


def place(height: int, width: int) -> Tensor:
    """An image that says of every pixel where it was."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns]).float()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000))
def test_a_crop_is_a_rectangle_of_the_image_of_fair_size(height: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    part = cropped(place(height, width))
    _, h, w = part.shape
    top, left = part[:, 0, 0].int().tolist()
    assert torch.equal(part, place(height, width)[:, top : top + h, left : left + w])
    if height > 15 and width > 15 and 2 / 3 < height / width < 3 / 2:
        assert 0.7 - 0.1 < h * w / (height * width) <= 1  # sides are rounded to pixels
        assert 3 / 4 - 0.1 < h / w < 4 / 3 + 0.1


def test_crops_are_uniform_in_area_and_place() -> None:
    torch.manual_seed(0)
    parts = [cropped(place(200, 200)) for _ in range(DRAWS)]
    areas = torch.tensor([part[0].numel() / 200**2 for part in parts])
    assert areas.min() >= 0.69
    assert 0.7 < float(areas.mean()) < 0.87  # crops that stick out are drawn again, so large ones are rarer
    free = torch.tensor([200 - part.shape[1] for part in parts])
    tops = torch.tensor([float(part[0, 0, 0]) for part in parts])
    assert abs(float((tops / free.clamp_min(1)).mean()) - 0.5) < 0.07
    assert bool((tops == free).any())
    assert bool((tops == 0).any())


@pytest.mark.parametrize("shape", [(10, 100), (100, 10)])
def test_of_an_image_too_long_the_middle_is_taken(functional: Any, shape: tuple[int, int]) -> None:
    transforms = import_module("torchvision.transforms")
    top, left, h, w = transforms.RandomResizedCrop.get_params(torch.zeros(3, *shape), [0.7, 1], [3 / 4, 4 / 3])
    assert torch.equal(cropped(place(*shape)), place(*shape)[:, top : top + h, left : left + w])


def test_flips_and_grays_are_as_frequent_as_said() -> None:
    torch.manual_seed(0)
    image = torch.zeros(3, 24, 24)
    image[0], image[1, :, 12:] = 0.6, 0.4  # red at the left, a mixture at the right
    made = [Augmented(PLAIN)(image) for _ in range(DRAWS)]
    grays = [bool((one == one[:1]).all()) for one in made]
    flipped = [float(one.std(0)[:, 0].mean()) > float(one.std(0)[:, -1].mean()) for one in made]
    assert 0.06 < sum(grays) / DRAWS < 0.15
    colored = [flip for flip, without in zip(flipped, grays, strict=True) if not without]
    assert 0.4 < sum(colored) / len(colored) < 0.6


def test_colors_are_changed_in_any_order_within_bounds() -> None:
    torch.manual_seed(0)
    image = colors()
    made = torch.stack([recolored(image) for _ in range(100)])
    assert made.min() >= 0
    assert made.max() <= 1
    assert len({one.sum().item() for one in made}) > 95
    dark = torch.stack([recolored(torch.full((3, 4, 4), 0.5)) for _ in range(DRAWS)]).amax((1, 2, 3))
    assert 0.35 <= float(dark.min()) < 0.37  # of gray, brightness alone can change
    assert 0.63 < float(dark.max()) <= 0.65 + 1e-6


def test_the_seed_decides() -> None:
    image = torch.rand(3, 40, 30)
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(Augmented(PLAIN)(image))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_a_batch_is_drawn_for_image_by_image() -> None:
    images = torch.rand(1, 3, 32, 32).expand(4, -1, -1, -1)
    torch.manual_seed(0)
    batch = Augmented(PLAIN)(images)
    torch.manual_seed(0)
    assert torch.equal(batch, torch.stack([Augmented(PLAIN)(image) for image in images]))
    assert not torch.equal(batch[0], batch[1])


def test_normalizing_comes_last() -> None:
    image, mean, std = torch.rand(3, 30, 30), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    torch.manual_seed(0)
    plain = Augmented(PLAIN)(image)
    torch.manual_seed(0)
    made = Augmented(Preprocessing(size=24, mean=mean, std=std))(image)
    by_hand = (plain - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(made, by_hand)
    assert made.shape == (3, 24, 24)


@pytest.mark.parametrize("channels", [1, 2])
def test_images_without_color_keep_their_channels_and_size(channels: int) -> None:
    made = Augmented(Preprocessing())(torch.rand(2, channels, 28, 20))
    assert made.shape == (2, channels, 28, 20)
    assert made.isfinite().all()


def test_gray_images_become_color_images_if_the_model_takes_color() -> None:
    made = Augmented(Preprocessing(size=8, mean=(0.5,) * 3, std=(0.5,) * 3))(torch.rand(1, 9, 9))
    assert made.shape == (3, 8, 8)


def test_it_is_a_value() -> None:
    assert Augmented(PLAIN) == Augmented(Preprocessing(size=24))
    assert repr(Augmented(PLAIN)) == f"Augmented(preprocessing={PLAIN!r})"
