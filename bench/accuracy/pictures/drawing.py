"""Draws shapes and digits into pictures, which are arrays [height, width, 3] uint8."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
Mask = NDArray[np.bool_]

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (150, 60, 180),
    "orange": (240, 140, 30),
    "pink": (245, 150, 190),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle")
CELL = 16  # pixels of an edge. Each shape and each digit has its own cell, so that none overlap
# Of a shape, as shares of the cell's edge; a large one has almost the whole cell
RADIUS, LARGE_RADIUS = (0.28, 0.38), (0.36, 0.44)
GLYPH_SCALE = 2
# 5 x 7 pixels, row by row
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
_GLYPHS = [
    np.kron(
        np.array([[bit == "1" for bit in row] for row in glyph.split()]),
        np.ones((GLYPH_SCALE, GLYPH_SCALE), np.bool_),
    )
    for glyph in GLYPHS
]
GLYPH_HEIGHT, GLYPH_WIDTH = _GLYPHS[0].shape


def ground(draw: random.Random, height: int, width: int) -> Picture:
    """Returns a dark picture with noise."""
    noise = np.random.default_rng(draw.getrandbits(32))
    grey = draw.randint(0, 50)
    return noise.integers(grey, grey + 20, (height, width, 3), dtype=np.uint8)


def put_shape(
    draw: random.Random,
    picture: Picture,
    kind: str,
    colour: str,
    cell: tuple[int, int],
    radii: tuple[float, float] = RADIUS,
) -> None:
    """Draws a shape of random size somewhere within `cell`, a (row, column)."""
    radius = CELL * draw.uniform(*radii)
    margin = min(radius + 1.5, CELL / 2)
    y, x = (draw.uniform(margin, CELL - margin) for _ in range(2))
    top, left = (CELL * place for place in cell)
    inside = picture[top : top + CELL, left : left + CELL]
    paint(draw, inside, shape_mask(kind, CELL, CELL, y, x, radius), colour)


def put_number(draw: random.Random, picture: Picture, digits: str, colour: str) -> None:
    """Draws `digits` into neighbouring cells of a random row, each somewhere in its cell."""
    height, width, _ = picture.shape
    mask = np.zeros((height, width), np.bool_)
    row = draw.randrange(height // CELL)
    first = draw.randint(0, width // CELL - len(digits))
    for column, digit in enumerate(digits, first):
        top = row * CELL + draw.randint(0, CELL - GLYPH_HEIGHT)
        left = column * CELL + draw.randint(0, CELL - GLYPH_WIDTH)
        mask[top : top + GLYPH_HEIGHT, left : left + GLYPH_WIDTH] = _GLYPHS[int(digit)]
    paint(draw, picture, mask, colour)


def put_large_shape(draw: random.Random, picture: Picture, colour: str) -> None:
    """Draws one shape that has about half of the picture."""
    height, width, _ = picture.shape
    radius = min(height, width) * draw.uniform(0.25, 0.4)
    y, x = (draw.uniform(radius, edge - radius) for edge in (height, width))
    paint(draw, picture, shape_mask(draw.choice(SHAPES), height, width, y, x, radius), colour)


def shape_mask(kind: str, height: int, width: int, y: float, x: float, radius: float) -> Mask:
    """Returns the pixels of a shape around (y, x)."""
    down, right = np.ogrid[:height, :width]
    dy, dx = down - y, right - x
    inside: Any
    if kind == "circle":
        inside = dy * dy + dx * dx <= radius * radius
    elif kind == "square":
        inside = np.maximum(np.abs(dy), np.abs(dx)) <= 0.85 * radius
    else:
        inside = (np.abs(dx) <= 0.6 * (dy + radius)) & (dy <= 0.8 * radius)
    mask: Mask = inside
    return mask


def paint(draw: random.Random, picture: Picture, mask: Mask, colour: str) -> None:
    """Gives the pixels of `mask` a shade of `colour`."""
    shade = [min(255, value + draw.randint(-12, 12)) for value in COLOURS[colour]]
    picture[mask] = np.array(shade, np.uint8)
