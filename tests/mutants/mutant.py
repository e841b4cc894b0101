"""A mutant, the random sample of them, and the journal of a run, from which an interrupted run goes on."""

from __future__ import annotations

import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed place of one source file."""

    name: str  # file and change, without the number of the line, which other edits move
    file: str  # its path in the checkout
    line: int
    place: object  # equal for mutants of which a sample has one at most
    tool: Any  # the mutant as its tool knows it


def named(mutants: Iterable[tuple[str, str, int, object, Any]]) -> dict[str, Mutant]:
    """Returns the mutants by name. Each is given as file, change, line, place and `tool`; equal names get a number."""
    found: dict[str, Mutant] = {}
    seen: Counter[str] = Counter()
    for file, change, line, place, tool in mutants:
        name = f"{file}: {change}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" #{seen[name]}"
        found[name] = Mutant(name, file, line, place, tool)
    return found


class ResultsFile:
    """The names of a sample, and the outcome of each mutant that was run, in a file of JSON lines.

    The sample stays the same when sources or tests change. A mutant that has gone with its line is left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.sample: list[str] | None = json.loads(lines[0]) if lines else None
        self.outcomes: dict[str, str] = dict(json.loads(line) for line in lines[1:])

    def choose(self, mutants: dict[str, Mutant], size: int | None, seed: int) -> list[Mutant]:
        """Returns one mutant for each of `size` random places (all mutants without a size), in a random order, so that
        each part of the sample is a random one as well."""
        if self.sample is None:
            drawn = random.Random(seed)
            places: dict[object, list[str]] = {}
            for mutant in mutants.values():
                places.setdefault(mutant.place if size else mutant.name, []).append(mutant.name)
            chosen = drawn.sample(list(places), min(size or len(places), len(places)))
            self.sample = [drawn.choice(places[place]) for place in chosen]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.sample) + "\n")
        return [mutants[name] for name in self.sample if name in mutants]

    def note(self, name: str, outcome: str) -> None:
        self.outcomes[name] = outcome
        with self.path.open("a") as file:
            file.write(json.dumps([name, outcome]) + "\n")


def equivalents() -> dict[str, str]:
    """Returns the reasons of the mutants that no test can find, by name."""
    path = Path(__file__).with_name("equivalent.toml")
    groups = tomllib.loads(path.read_text()).get("equivalent", [])
    return {name: group["reason"] for group in groups for name in group["mutants"]}
