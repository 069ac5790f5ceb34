"""Random views of images against SciPy and NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import affine_transform
from torch import Tensor

from adanpc.lab.adapt.adapter import BatchError
from adanpc.lab.adapt.augment import augmix, flip, jitter, shift, warp

VIEWS: list[Callable[[Tensor], Tensor]] = [flip, shift, warp, jitter, augmix]
EACH = pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)


def pictures(count: int, channels: int = 3, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(seed))


def seeded(view: Callable[[Tensor], Tensor], images: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return view(images)


@EACH
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 12), (5, 28, 9), (2, 1, 1)], ids=str)
def test_any_size_and_channel_count_is_kept(view: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> None:
    images = pictures(6, *shape)
    before = images.clone()
    made = view(images)
    assert made.shape == images.shape
    assert made.dtype == images.dtype
    assert made.isfinite().all()
    assert torch.equal(images, before)


@EACH
@given(gain=st.floats(0.1, 50), offset=st.floats(-20, 20), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=15)
def test_the_range_of_values_does_not_matter(
    view: Callable[[Tensor], Tensor], gain: float, offset: float, seed: int
) -> None:
    """Views of images in other units are the views in other units."""
    images = pictures(4).double()
    made = seeded(view, gain * images + offset, seed)
    expected = gain * seeded(view, images, seed) + offset
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)


@EACH
def test_the_seed_decides(view: Callable[[Tensor], Tensor]) -> None:
    images = pictures(16)
    assert torch.equal(seeded(view, images, 1), seeded(view, images, 1))
    assert not torch.equal(seeded(view, images, 1), seeded(view, images, 2))


@EACH
def test_every_image_draws_its_own_change(view: Callable[[Tensor], Tensor]) -> None:
    made = seeded(view, pictures(1, height=16, width=16).expand(16, -1, -1, -1))
    least = 2 if view is flip else 9
    assert len(torch.unique(made, dim=0)) >= least


@EACH
def test_a_constant_image_stays_constant(view: Callable[[Tensor], Tensor]) -> None:
    images = torch.full((8, 3, 8, 8), -2.5)
    torch.testing.assert_close(seeded(view, images), images)


@EACH
def test_features_are_no_images(view: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(BatchError, match=r"views are made of images \(B, C, H, W\), got a batch of shape \(4, 6\)"):
        view(torch.zeros(4, 6))


def test_flip_mirrors_about_half_of_the_images_and_leaves_the_others() -> None:
    images = pictures(400)
    mirrored = 0
    for image, made in zip(images.numpy(), seeded(flip, images).numpy(), strict=True):
        is_mirrored = np.array_equal(made, image[:, :, ::-1])
        assert is_mirrored or np.array_equal(made, image)
        mirrored += is_mirrored
    assert 150 < mirrored < 250


def test_shift_is_a_crop_after_padding_by_the_edge() -> None:
    images = pictures(60, height=16, width=8)
    found = set()
    for image, made in zip(images.numpy(), seeded(shift, images).numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (2, 2), (1, 1)), mode="edge")
        places = [(y, x) for y in range(5) for x in range(3) if np.array_equal(made, padded[:, y : y + 16, x : x + 8])]
        assert len(places) == 1
        found.update(places)
    assert len(found) == 15  # all there are


@pytest.mark.parametrize(("height", "width"), [(9, 9), (8, 14)])
def test_warp_is_scipy_s_affine_transform(height: int, width: int) -> None:
    images = pictures(5, 1, height, width).double()
    made = seeded(lambda batch: warp(batch, degrees=40, move=0.2, zoom=0.3), images).numpy()
    torch.manual_seed(0)
    draws = (2 * torch.rand(5, 4) - 1).double().numpy()
    center = np.array([(height - 1) / 2, (width - 1) / 2])
    for image, result, (turn, right, down, grow) in zip(images.numpy(), made, draws, strict=True):
        angle = math.radians(40 * turn)
        size = 1 + 0.3 * grow
        matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) / size
        move = np.array([0.2 * down * height, 0.2 * right * width])
        offset = center - matrix @ center + move
        expected = affine_transform(image[0], matrix, offset, order=1, mode="nearest")
        np.testing.assert_allclose(result[0], expected, atol=1e-6)


def test_jitter_changes_contrast_brightness_and_saturation() -> None:
    images = pictures(5).double()
    made = seeded(jitter, images).numpy()
    torch.manual_seed(0)
    draws = 0.3 * (2 * torch.rand(5, 3) - 1).double().numpy()
    for image, result, (contrast, brightness, saturation) in zip(images.numpy(), made, draws, strict=True):
        lit = image.mean() + (1 + contrast) * (image - image.mean()) + brightness * image.std()
        gray = lit.mean(0, keepdims=True)
        np.testing.assert_allclose(result, gray + (1 + saturation) * (lit - gray), atol=1e-6)


def test_jitter_of_one_channel_is_affine_in_value() -> None:
    image = pictures(1, 1)
    made = seeded(jitter, image)
    slope, offset = np.polyfit(image.flatten(), made.flatten(), 1)
    np.testing.assert_allclose(made, slope * image + offset, atol=1e-5)


@pytest.mark.parametrize("view", [lambda x: warp(x, 0, 0, 0), lambda x: jitter(x, 0), lambda x: augmix(x, strength=0)])
def test_changes_of_no_strength_change_nothing(view: Callable[[Tensor], Tensor]) -> None:
    images = pictures(6, height=7, width=10)
    torch.testing.assert_close(view(images), images, atol=1e-5, rtol=1e-5)


def test_augmix_is_stronger_with_strength_and_mild_by_default() -> None:
    rows = torch.linspace(-1, 1, 32)
    images = (rows[:, None] * 2 + rows[None]).sin().expand(200, 3, 32, 32)

    def change(strength: float) -> float:
        changed = seeded(lambda batch: augmix(batch, strength=strength), images)
        return float((changed - images).square().mean())

    weak = change(0.1)
    default = change(0.3)
    strong = change(1.0)
    assert weak < default < strong
    assert default < 0.2 * float(images.var())


@pytest.mark.parametrize(("depth", "share"), [(1, 1 / 7), (2, (1 / 7 + 1 / 49) / 2)])
def test_augmix_draws_among_seven_changes_in_chains_of_all_lengths(depth: int, share: float) -> None:
    """A chain of brightness alone moves all pixels alike: by its share times the draw, in standard deviations."""
    image = pictures(1, 1, 16, 16)
    torch.manual_seed(0)
    changed = (augmix(image.expand(8000, -1, -1, -1), width=1, depth=depth) - image).flatten(1)
    moves = changed.mean(1)[changed.std(1) < 1e-6] / image.std(correction=0)
    assert len(moves) / 8000 == pytest.approx(share, rel=0.15)
    assert float(moves.abs().max()) <= 0.3 * depth
    assert float(moves.mean()) == pytest.approx(0, abs=0.01)
    if depth == 1:
        assert float(moves.abs().mean()) == pytest.approx(0.3 / 4, rel=0.1)  # shares and draws are uniform
