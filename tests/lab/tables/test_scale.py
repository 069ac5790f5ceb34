"""How much is done, and in words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.tables.scale import SCALES, length, seconds


@pytest.mark.parametrize(
    ("text", "expected"), [("30m", 1800), ("2h", 7200), ("90s", 90), ("1h30m", 5400), ("1d", 86400), (" 5M ", 300)]
)
def test_times(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "30", "m", "1.5h", "h30", "-3m", "3 x"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(AdaNPCError, match="budget must be a time such as 30m, 2h or 1h30m"):
        seconds(text)
    with pytest.raises(AdaNPCError, match="budget must be longer than 0 s, got '0m'"):
        seconds("0m")


@pytest.mark.parametrize(
    ("span", "words"),
    [(3, "3 s"), (59, "59 s"), (60, "1 min"), (5400, "90 min"), (9000, "2.5 h"), (86400 * 30, "30 days")],
)
def test_lengths(span: float, words: str) -> None:
    assert length(span) == words


def test_only_the_papers_size_is_called_full() -> None:
    assert SCALES["full"].about().startswith("Full (full): 5,000 steps, ")
    for scale in list(SCALES.values())[1:]:
        assert scale.about().startswith("Reduced (")
        assert f"{scale.steps:,} steps (paper 5,000)" in scale.about()
    assert replace(SCALES["full"], steps=7).about().startswith("Reduced (full): 7 steps (paper 5,000)")
    assert "encoder deit-s16 for photos" in replace(SCALES["full"], encoder="deit-s16").about()


def test_only_what_matters_is_said() -> None:
    assert SCALES["small"].about(("images",)) == "Reduced (small): at most 2,000 images of each domain."
    assert SCALES["large"].about(("images", "seeds")) == "Full (large): all images, 3 seeds."
    assert SCALES["small"].about(()) == "Scale: small."


def test_scales_go_down() -> None:
    sizes = [(s.steps, s.trials, s.seeds, s.images or 10**9) for s in SCALES.values()]
    for larger, smaller in pairwise(sizes):
        assert all(a >= b for a, b in zip(larger, smaller, strict=True))


def test_the_spec_of_a_trial() -> None:
    small = replace(SCALES["small"], encoder="efficientnet-lite0")
    photo, digit = small.spec("pacs", ("photo",), "erm", 2, 0), small.spec("rotated-mnist", ("0",), "knn")
    assert (photo.encoder, photo.pretrained, photo.seed, photo.images) == ("efficientnet-lite0", True, 2, 2000)
    assert (digit.encoder, digit.complete().encoder, digit.steps, digit.complete().every) == ("", "convnet", 300, 100)
    assert SCALES["full"].spec("pacs", ("photo",), "erm").complete().encoder == "resnet-50"


def test_rows_are_wanted_by_name_whatever_its_case() -> None:
    some = replace(SCALES["full"], only=("erm", "AdaNPC"))
    assert some.wants("ERM")
    assert some.wants("adanpc")
    assert not some.wants("CORAL")
    assert SCALES["full"].wants("CORAL")
