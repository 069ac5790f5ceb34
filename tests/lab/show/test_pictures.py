"""The pictures of the repository: small, in the right form, and shown by some page."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[3]
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests")
SUFFIXES = {".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp"}
MOST_BYTES = 3_000_000


def pictures() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.suffix in SUFFIXES and path.name != "demo.png"]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return found


def test_all_pictures_together_stay_below_three_megabytes() -> None:
    """Git keeps every version of every picture forever."""
    sizes = {path: path.stat().st_size for path in pictures()}
    assert sizes
    largest = max(sizes, key=lambda path: sizes[path])
    assert sum(sizes.values()) <= MOST_BYTES, f"draw fewer or smaller pictures; the largest is {largest}"


def test_photographs_are_jpeg_and_charts_have_a_palette() -> None:
    tables = ROOT / "benchmarks" / "results" / "tables"
    for path in tables.glob("*.png"):
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("PNG", "P"), path
    for path in tables.glob("*.jpg"):
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB"), path


def test_the_pages_of_results_show_pictures_that_are_there() -> None:
    folder = ROOT / "benchmarks" / "results"
    linked = set()
    for page in [*folder.rglob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8").replace(r"\[", "")):
            picture = (page.parent / target).resolve()
            assert picture.exists(), f"{page}: {target}"
            linked.add(picture)
    linked.add(folder / "core.png")  # stands beside its table
    unused = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.resolve() not in linked]
    assert unused == []
