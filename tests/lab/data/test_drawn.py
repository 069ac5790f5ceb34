"""Pictures that are drawn: always the same, all different, and each in its style."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.data import read_images
from adanpc.lab.data.drawn import SIDE, STYLES, THINGS, draw_thing, write_drawn


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("thing", THINGS)
def test_every_thing_in_every_style_is_drawn_the_same_each_time(thing: str, style: str) -> None:
    seen = set()
    for number in range(3):
        picture = draw_thing(thing, style, number)
        assert (picture.size, picture.mode) == ((SIDE, SIDE), "RGB")
        assert picture.tobytes() == draw_thing(thing, style, number).tobytes()
        assert np.asarray(picture).std() > 5, "there is something to see"
        seen.add(picture.tobytes())
    assert len(seen) == 3


def test_styles_differ_as_their_names_say() -> None:
    def color(style: str) -> float:
        """How far the channels of a pixel are from each other, on average."""
        pixels = np.stack([np.asarray(draw_thing(thing, style, 0), np.float64) for thing in THINGS])
        return float((pixels.max(-1) - pixels.min(-1)).mean())

    assert color("sketch") < 10 < color("cartoon")
    assert color("sketch") < color("photo")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AdaNPCError, match="thing must be one of boat, cup"):
        draw_thing("car", "photo", 0)
    with pytest.raises(AdaNPCError, match="style must be one of art_painting"):
        draw_thing("boat", "oil", 0)


def test_written_pictures_are_a_folder_of_images(tmp_path: Path) -> None:
    for style in ("photo", "sketch"):
        write_drawn(tmp_path / style, style, range(2))
    data = read_images(tmp_path)
    assert [domain.name for domain in data.domains] == ["photo", "sketch"]
    assert [len(domain) for domain in data.domains] == [2 * len(THINGS)] * 2
    assert list(data.classes) == list(THINGS)
