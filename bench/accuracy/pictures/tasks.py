"""Questions about drawn pictures. All problems are drawn at random; held-out ones are not in training."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from pictures.drawing import (
    CELL,
    COLOURS,
    LARGE_RADIUS,
    SHAPES,
    Picture,
    ground,
    put_large_shape,
    put_number,
    put_shape,
)

TILE = 48  # pixels of an edge of a tile of the small model
SIZES = [(TILE, TILE), (TILE, 2 * TILE)]  # (height, width) of a picture
MOST = 9  # shapes to count
MOST_DIGITS = 4
FRAMES = (3, 4, 6, 8)  # of a video
CHANGES = 3  # colours in an order
HELD_OUT_SHARE = 10  # one number, and one order of colours, in ten is not in training


@dataclass(frozen=True, slots=True)
class Problem:
    pictures: list[Picture]  # of one size; of a video the frames
    question: str
    answer: str


# Makes a random problem with pictures of the size (height, width). `held_out` problems are not in training.
Maker = Callable[[random.Random, tuple[int, int], bool], Problem]


def counting(draw: random.Random, size: tuple[int, int], held_out: bool) -> Problem:
    del held_out  # the places and colours of shapes are so many that none occur twice
    picture = ground(draw, *size)
    count = draw.randint(1, MOST)
    for cell in draw.sample(_cells(size), count):
        put_shape(draw, picture, draw.choice(SHAPES), draw.choice(list(COLOURS)), cell)
    ask = draw.choice(
        ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
    )
    return Problem([picture], ask, str(count))


def digits(draw: random.Random, size: tuple[int, int], held_out: bool) -> Problem:
    picture = ground(draw, *size)
    number = _number(draw, min(MOST_DIGITS, size[1] // CELL), held_out)
    put_number(draw, picture, number, draw.choice(list(COLOURS)))
    ask = draw.choice(("Which number is this?", "What number is shown?", "Read the number."))
    return Problem([picture], ask, number)


def colours(draw: random.Random, size: tuple[int, int], held_out: bool) -> Problem:
    """Up to three shapes of different kinds and colours; the colour of one of them."""
    del held_out
    picture = ground(draw, *size)
    kinds = draw.sample(SHAPES, draw.randint(1, len(SHAPES)))
    names = draw.sample(list(COLOURS), len(kinds))
    cells = draw.sample(_cells(size), len(kinds))
    for kind, colour, cell in zip(kinds, names, cells, strict=True):
        put_shape(draw, picture, kind, colour, cell, LARGE_RADIUS)
    ask = draw.choice(
        ("What colour is the {}?", "Which colour has the {}?", "Name the colour of the {}.")
    )
    return Problem([picture], ask.format(kinds[0]), names[0])


def frames(
    draw: random.Random, size: tuple[int, int], held_out: bool, count: int | None = None
) -> Problem:
    """A video of `count` frames, or of a random number, in which a shape changes its colour twice."""
    order = _order(draw, held_out)
    count = count or draw.choice(FRAMES)
    changes = sorted(draw.sample(range(1, count), CHANGES - 1))
    shown = [order[sum(frame >= change for change in changes)] for frame in range(count)]
    ask = draw.choice(("In which order do the colours come?", "Name the colours in their order."))
    return Problem([_coloured(draw, size, name) for name in shown], ask, ", ".join(order))


def several(draw: random.Random, size: tuple[int, int], held_out: bool) -> Problem:
    """Three pictures with one shape each."""
    order = _order(draw, held_out)
    ask = draw.choice(("Which colours do the pictures show?", "Name the colour in each picture."))
    return Problem([_coloured(draw, size, name) for name in order], ask, ", ".join(order))


SINGLE: dict[str, Maker] = {"counting": counting, "digits": digits, "colours": colours}
TASKS: dict[str, Maker] = SINGLE | {"frames": frames, "several": several}


def is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def _number(draw: random.Random, most: int, held_out: bool) -> str:
    """Returns a number of up to `most` digits. No single digit is held out."""
    while True:
        count = draw.randint(1, most)
        number = str(draw.randrange(10 ** (count - 1) if count > 1 else 0, 10**count))
        if count == 1 or is_held_out(number) == held_out:
            return number


def _order(draw: random.Random, held_out: bool) -> list[str]:
    while True:
        order = draw.sample(list(COLOURS), CHANGES)
        if is_held_out(" ".join(order)) == held_out:
            return order


def _coloured(draw: random.Random, size: tuple[int, int], colour: str) -> Picture:
    picture = ground(draw, *size)
    put_large_shape(draw, picture, colour)
    return picture


def _cells(size: tuple[int, int]) -> list[tuple[int, int]]:
    height, width = size
    return [(row, column) for row in range(height // CELL) for column in range(width // CELL)]
