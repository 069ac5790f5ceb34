"""Drawn pictures: six kinds of things in the four styles of PACS, for examples that need no download."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import cos, pi, sin
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFilter

from adanpc.lab.seeds import seed_of
from adanpc.require import one_of

SIDE = 96  # pixels on each side of a picture
LARGE = 2 * SIDE  # the side at which a picture is drawn; reducing it afterward makes lines smooth
BLUR = LARGE / 128

Point = tuple[float, float]
Color = tuple[int, int, int]


class Part(NamedTuple):
    """A part of a thing: its closed outline, in a square from -1 to 1 with y upward, and its natural color."""

    outline: list[Point]
    color: Color


# Things -------------------------------------------------------------------------------------------------------------


def boat(random: Generator) -> list[Part]:
    """Returns a sailing boat: hull, mast, one or two sails."""
    deck = -0.3
    boom = deck + 0.12  # the lower edge of the sails
    height = random.uniform(0.65, 0.95)
    hull = [(-0.85, deck), (0.85, deck), (random.uniform(0.45, 0.65), -0.75), (-0.55, -0.75)]
    mast = [(-0.04, deck), (0.04, deck), (0.04, height), (-0.04, height)]
    mainsail = [(0.09, boom), (random.uniform(0.5, 0.8), boom), (0.09, height - 0.05)]
    parts = [Part(hull, (135, 75, 45)), Part(mast, (90, 65, 45)), Part(mainsail, (240, 235, 215))]
    if random.random() < 0.7:
        foresail = [(-0.09, boom), (-random.uniform(0.4, 0.7), boom), (-0.09, height - 0.2)]
        parts.append(Part(foresail, (225, 90, 70)))
    return parts


def cup(random: Generator) -> list[Part]:
    """Returns a cup with a handle, and often a saucer."""
    narrow = random.uniform(0.3, 0.5)
    handle = ellipse(0.6, 0.05, 0.33, 0.33)
    hole = ellipse(0.6, 0.05, 0.17, 0.18)
    body = [(-0.6, 0.6), (0.6, 0.6), (narrow, -0.55), (-narrow, -0.55)]
    coffee = ellipse(0, 0.6, 0.6, 0.13)
    parts = [Part(handle, (60, 110, 170)), Part(hole, (235, 235, 230)), Part(body, (70, 125, 190))]
    parts.append(Part(coffee, (95, 60, 40)))
    if random.random() < 0.6:
        saucer = ellipse(0, -0.6, 0.85, 0.14)
        parts.insert(0, Part(saucer, (205, 210, 220)))
    return parts


def fish(random: Generator) -> list[Part]:
    """Returns a fish that looks to the left: body, tail, fin and eye."""
    length = random.uniform(0.58, 0.68)
    height = random.uniform(0.32, 0.46)
    spread = random.uniform(0.32, 0.48)
    tail = [(length - 0.22, 0), (0.92, spread), (0.78, 0), (0.92, -spread)]
    fin = [(-0.2, height - 0.1), (0.05, height + 0.28), (0.3, height - 0.14)]
    body = ellipse(-0.12, 0, length, height)
    eye = ellipse(-0.5, 0.1, 0.08, 0.08)
    return [Part(tail, (220, 120, 40)), Part(fin, (220, 120, 40)), Part(body, (240, 150, 55)), Part(eye, (25, 25, 30))]


def flower(random: Generator) -> list[Part]:
    """Returns a flower: stem, leaf, petals around a center."""
    petals = int(random.integers(5, 8))
    reach = random.uniform(0.3, 0.4)
    size = random.uniform(0.2, 0.27)
    color = [(210, 60, 110), (230, 200, 60), (150, 90, 190)][int(random.integers(3))]
    stem = [(-0.05, 0.2), (0.05, 0.2), (0.06, -0.95), (-0.04, -0.95)]
    parts = [Part(stem, (60, 130, 60)), Part(ellipse(0.28, -0.55, 0.26, 0.1), (75, 150, 70))]
    for number in range(petals):
        angle = 2 * pi * number / petals
        parts.append(Part(ellipse(reach * cos(angle), 0.42 + reach * sin(angle), size, size), color))
    parts.append(Part(ellipse(0, 0.42, 0.2, 0.2), (245, 205, 70)))
    return parts


def house(random: Generator) -> list[Part]:
    """Returns a house: walls, roof, door, window, often a chimney."""
    wall = random.uniform(0.55, 0.72)
    eaves = random.uniform(0.05, 0.25)
    top = random.uniform(0.7, 0.95)
    door = random.uniform(-0.35, 0.05)
    parts = [Part(box(-wall, -0.85, wall, eaves), (225, 200, 160))]
    if random.random() < 0.7:
        parts.append(Part(box(0.3, eaves + 0.1, 0.48, top), (150, 70, 60)))
    parts.append(Part([(-wall - 0.15, eaves), (wall + 0.15, eaves), (0, top)], (170, 60, 50)))
    parts.append(Part(box(door, -0.85, door + 0.28, -0.25), (95, 65, 45)))
    parts.append(Part(box(wall - 0.36, -0.4, wall - 0.1, -0.12), (120, 180, 220)))
    return parts


def tree(random: Generator) -> list[Part]:
    """Returns a tree: a trunk under a round crown, or under the tiers of a fir."""
    trunk = Part(box(-0.11, -0.95, 0.11, -0.2), (110, 75, 45))
    red = int(random.integers(45, 80))
    green = int(random.integers(120, 150))
    if random.random() < 0.4:
        crown = [
            [(-0.7, -0.45), (0.7, -0.45), (0, 0.1)],
            [(-0.55, -0.1), (0.55, -0.1), (0, 0.5)],
            [(-0.4, 0.25), (0.4, 0.25), (0, 0.95)],
        ]
    else:
        crown = [
            ellipse(-0.32, 0.1, 0.38, 0.34),
            ellipse(0.34, 0.12, 0.38, 0.34),
            ellipse(0, 0.45, 0.45, 0.42),
        ]
    return [trunk, *(Part(outline, (red, green, 60)) for outline in crown)]


def ellipse(x: float, y: float, width: float, height: float) -> list[Point]:
    """Returns the outline of an ellipse with this center and these half axes, as 40 points."""
    outline = []
    for number in range(40):
        angle = 2 * pi * number / 40
        outline.append((x + width * cos(angle), y + height * sin(angle)))
    return outline


def box(left: float, bottom: float, right: float, top: float) -> list[Point]:
    """Returns the outline of a box."""
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


THINGS: dict[str, Callable[[Generator], list[Part]]] = {
    "boat": boat,
    "cup": cup,
    "fish": fish,
    "flower": flower,
    "house": house,
    "tree": tree,
}


# Styles -------------------------------------------------------------------------------------------------------------


def photo(parts: list[Part], random: Generator) -> Image.Image:
    """Draws like a photo: uneven light, a blurred background, grain."""
    picture = _background(random, (150, 180, 205), (120, 130, 95))
    shades = Image.new("RGB", picture.size)
    draw = ImageDraw.Draw(shades)
    mask = Image.new("L", picture.size)
    for part in parts:
        draw.polygon(part.outline, fill=_varied(part.color, random, 25))
        ImageDraw.Draw(mask).polygon(part.outline, fill=255)
    light = np.linspace(random.uniform(0.95, 1.25), random.uniform(0.55, 0.85), LARGE)
    lit = np.asarray(shades) * light[None, :, None]
    picture.paste(Image.fromarray(lit.clip(0, 255).astype(np.uint8)), mask=mask)
    return _grainy(picture.filter(ImageFilter.GaussianBlur(BLUR)), random, 9)


def art_painting(parts: list[Part], random: Generator) -> Image.Image:
    """Draws like a painting: warm colors in broad strokes that do not follow the outlines."""
    picture = _background(random, (205, 170, 120), (165, 125, 90))
    draw = ImageDraw.Draw(picture)
    for part in parts:
        draw.polygon(_shaken(part.outline, random, LARGE / 60), fill=_varied(_warm(part.color), random, 20))
    strokes = np.asarray(picture).astype(np.int64)
    direction = 1 if random.random() < 0.5 else -1
    waves = np.sin(np.arange(LARGE) / (LARGE / random.uniform(40, 70)))
    ground = np.add.outer(waves, direction * waves) + random.normal(0, 0.5, (LARGE, LARGE))
    painted = Image.fromarray((strokes + 16 * ground[..., None]).clip(0, 255).astype(np.uint8))
    return painted.filter(ImageFilter.ModeFilter(5)).filter(ImageFilter.GaussianBlur(BLUR / 2))


def cartoon(parts: list[Part], random: Generator) -> Image.Image:
    """Draws like a cartoon: flat bright colors, dark outlines, a plain background."""
    grounds = [(255, 244, 214), (214, 238, 255), (226, 246, 220), (250, 226, 238)]
    picture = Image.new("RGB", (LARGE, LARGE), grounds[int(random.integers(len(grounds)))])
    draw = ImageDraw.Draw(picture)
    for part in parts:
        draw.polygon(part.outline, fill=_bright(part.color))
        # One point beyond the start, so that the line has a joint there, too.
        closed = [*part.outline, part.outline[0], part.outline[1]]
        draw.line(closed, fill=(30, 25, 35), width=LARGE // 38, joint="curve")
    return picture


def sketch(parts: list[Part], random: Generator) -> Image.Image:
    """Draws like a sketch: pencil lines on paper that miss each other, and a little hatching."""
    picture = Image.new("RGB", (LARGE, LARGE), (250, 249, 246))
    draw = ImageDraw.Draw(picture)
    for part in parts:
        draw.polygon(part.outline, fill=(250, 249, 246))
        _hatch(picture, part, random)
        for _ in range(2):
            line = _shaken(part.outline, random, LARGE / 130)
            gray = int(random.integers(40, 110))
            draw.line([*line, line[0]], fill=(gray, gray, gray), width=LARGE // 100)
    return picture


def _hatch(picture: Image.Image, part: Part, random: Generator) -> None:
    """Shades a part with parallel lines if it is dark."""
    if sum(part.color) > 380:
        return
    lines = Image.new("RGB", picture.size, (250, 249, 246))
    draw = ImageDraw.Draw(lines)
    for start in range(-LARGE, LARGE, int(random.integers(LARGE // 30, LARGE // 20))):
        draw.line([(start, 0), (start + LARGE, LARGE)], fill=(150, 150, 150), width=LARGE // 160)
    mask = Image.new("L", picture.size)
    ImageDraw.Draw(mask).polygon(part.outline, fill=255)
    picture.paste(lines, mask=mask)


STYLES: dict[str, Callable[[list[Part], Generator], Image.Image]] = {
    "art_painting": art_painting,
    "cartoon": cartoon,
    "photo": photo,
    "sketch": sketch,
}


def _background(random: Generator, above: Color, below: Color) -> Image.Image:
    """Returns a background of two colors that blend into each other, with soft spots."""
    horizon = random.uniform(0.45, 0.75)
    weight = 1 / (1 + np.exp((np.linspace(0, 1, LARGE) - horizon) * 12))
    top = np.array(_varied(above, random, 30))
    bottom = np.array(_varied(below, random, 30))
    rows = weight[:, None] * top + (1 - weight[:, None]) * bottom  # (LARGE, 3)
    picture = Image.fromarray(np.repeat(rows[:, None], LARGE, axis=1).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for _ in range(6):
        x, y = random.uniform(0, LARGE, 2)
        radius = random.uniform(LARGE / 20, LARGE / 6)
        ground = below
        if y < horizon * LARGE:
            ground = above
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_varied(ground, random, 30))
    return picture.filter(ImageFilter.GaussianBlur(LARGE / 24))


def _grainy(picture: Image.Image, random: Generator, amount: float) -> Image.Image:
    """Returns a picture with gray noise added."""
    noise = random.normal(0, amount, (LARGE, LARGE, 1))
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))


def _shaken(outline: list[Point], random: Generator, amount: float) -> list[Point]:
    """Returns an outline whose points are moved at random."""
    shaken = []
    for x, y in outline:
        move_x = random.normal(0, amount)
        move_y = random.normal(0, amount)
        shaken.append((x + move_x, y + move_y))
    return shaken


def _varied(color: Color, random: Generator, amount: float) -> Color:
    """Returns a color whose channels are changed at random."""
    return _color([channel + random.normal(0, amount) for channel in color])


def _warm(color: Color) -> Color:
    """Returns a color with more red and less blue."""
    red, green, blue = color
    return _color([0.9 * red + 30, 0.85 * green + 15, 0.7 * blue])


def _bright(color: Color) -> Color:
    """Returns a lighter and more saturated color."""
    middle = sum(color) / 3
    return _color([middle + 1.5 * (channel - middle) + 15 for channel in color])


def _color(channels: list[float]) -> Color:
    """Returns the channels as whole numbers from 0 to 255."""
    red, green, blue = (int(min(255, max(0, channel))) for channel in channels)
    return red, green, blue


# Pictures -----------------------------------------------------------------------------------------------------------


def draw_thing(thing: str, style: str, number: int) -> Image.Image:
    """Returns a picture that is always the same for the same arguments; size, position and slant vary with the number.

    Args:
        thing: one of ``THINGS``.
        style: one of ``STYLES``.
        number: the number of the picture, from 0.
    """
    one_of("thing", thing, tuple(THINGS))
    one_of("style", style, tuple(STYLES))
    random = np.random.default_rng(seed_of(number, thing, style))
    parts = _placed(THINGS[thing](random), random)
    return STYLES[style](parts, random).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _placed(parts: list[Part], random: Generator) -> list[Part]:
    """Returns the parts in pixels, turned, stretched and moved a little, and perhaps mirrored."""
    angle = random.normal(0, 0.14)
    size = LARGE * random.uniform(0.3, 0.44)
    stretch = random.uniform(0.85, 1.15)
    mirror = random.choice([-1, 1])
    middle_x, middle_y = LARGE * random.uniform(0.44, 0.56, 2)

    def placed(point: Point) -> Point:
        """Returns a point in pixels, with y downward."""
        x = point[0] * mirror * stretch
        y = point[1]
        turned_x = x * cos(angle) - y * sin(angle)
        turned_y = x * sin(angle) + y * cos(angle)
        return middle_x + size * turned_x, middle_y - size * turned_y

    placed_parts = []
    for part in parts:
        outline = [placed(point) for point in part.outline]
        placed_parts.append(Part(outline, part.color))
    return placed_parts


def write_drawn(folder: Path, style: str, numbers: Iterable[int]) -> None:
    """Writes pictures of each thing in a style, as ``folder/<thing>/<number>.png``."""
    for thing in THINGS:
        (folder / thing).mkdir(parents=True, exist_ok=True)
    for number in numbers:
        for thing in THINGS:
            draw_thing(thing, style, number).save(folder / thing / f"{number:03}.png")
