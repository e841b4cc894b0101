"""Plots goodput over offered load as SVG, without a library.

python bench/router/overload_plot.py          # the newest kept rows, as docs/overload.svg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import ROOT

KEPT = ROOT / "bench" / "results" / "router_overload.jsonl"
PICTURE = ROOT / "docs" / "overload.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, GAP = 420, 300, 52, 46, 40, 30
COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#8d6a9f")


def plot(rows: Sequence[dict[str, Any]], capacity: float) -> str:
    """Draws one panel for each number of CPU burners, with one line for each system."""
    panels = sorted({row["burners"] for row in rows})
    systems = list(dict.fromkeys(row["system"] for row in rows))
    loads = sorted({row["load"] for row in rows})
    most = max(capacity, *(row["goodput"] for row in rows)) * 1.1
    width = len(panels) * (WIDTH + GAP) + GAP
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 28}" '
            'font-family="sans-serif" font-size="12" fill="#333">'
        ),
        f'<rect width="{width}" height="{HEIGHT + 28}" fill="#fff"/>',
    ]
    for number, burners in enumerate(panels):
        left = GAP + number * (WIDTH + GAP)
        own = [row for row in rows if row["burners"] == burners]
        beside = f", beside {burners} busy processes" if burners else ""
        title = "good answers a second" + beside
        parts += _panel(left, title, own, loads, most, capacity, systems)
    for number, system in enumerate(systems):
        x = GAP + LEFT + number * 170
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{HEIGHT + 8}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{HEIGHT + 18}">{escape(system)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    left: float,
    title: str,
    rows: Sequence[dict[str, Any]],
    loads: Sequence[float],
    most: float,
    capacity: float,
    systems: Sequence[str],
) -> list[str]:
    right, base = left + WIDTH, HEIGHT - BOTTOM
    lowest, highest = math.log2(loads[0]), math.log2(loads[-1])

    def x(load: float) -> float:
        share = (math.log2(load) - lowest) / ((highest - lowest) or 1)
        return left + LEFT + share * (WIDTH - LEFT - 10)

    def y(goodput: float) -> float:
        return base - goodput / most * (base - TOP)

    line = f'<line x1="{left + LEFT}" x2="{right}" stroke="#999"'
    parts = [
        f'<text x="{left + LEFT}" y="{TOP - 16}" font-weight="bold">{escape(title)}</text>',
        f'{line} y1="{base}" y2="{base}"/>',
        f'{line} y1="{y(capacity):.1f}" y2="{y(capacity):.1f}" stroke-dasharray="4"/>',
        f'<text x="{left}" y="{y(capacity) + 4:.1f}">{capacity:g} /s</text>',
        f'<text x="{left}" y="{base + 4}">0</text>',
        f'<text x="{left + LEFT + 60}" y="{HEIGHT - 10}">offered load, times the capacity</text>',
    ]
    parts += [
        f'<text x="{x(load):.1f}" y="{base + 16}" text-anchor="middle">{load:g}</text>'
        for load in loads
    ]
    for number, system in reversed(list(enumerate(systems))):  # the first one on top
        colour = COLOURS[number % len(COLOURS)]
        its = sorted((row["load"], row["goodput"]) for row in rows if row["system"] == system)
        points = " ".join(f"{x(load):.1f},{y(goodput):.1f}" for load, goodput in its)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x(load):.1f}" cy="{y(goodput):.1f}" r="3" fill="{colour}"/>'
            for load, goodput in its
        ]
    return parts


def newest_rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last row of each system, number of burners and load, of the lines with the last line's capacity."""
    capacity = lines[-1]["config"]["capacity"]
    rows = [row for line in lines if line["config"]["capacity"] == capacity for row in line["rows"]]
    return list({(row["system"], row["burners"], row["load"]): row for row in rows}.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=KEPT, help="lines of overload.py")
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    arguments.out.write_text(plot(newest_rows(lines), lines[-1]["config"]["capacity"]))


if __name__ == "__main__":
    main()
