"""Finds the arguments whose memory a compiled kernel reads before it waits for its predecessor.

An address is followed from the load back to the kernel's parameters: the result of an instruction comes from the
parameters of its operands. The result of a load is data, not an address. A register that is written in several places
comes from all of them, in any order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNKNOWN = "?"  # an address of unknown origin
REGISTER = re.compile(r"%\w+")
PARAMETER = re.compile(r"\w+_param_\d+")
ENTRY_PARAMETER = re.compile(r"\.param\s+([^,()]*?)\b(\w+_param_(\d+))\b")
LOCAL = r"(?!\S*\.(shared|param|local)\b)"
WRITES = re.compile(rf"(st|atom|red|ret|exit|trap|call)\b{LOCAL}")
READS = re.compile(rf"(ld|ldu|cp)\b{LOCAL}")
# To shared memory or from it, whose names come later in the opcode
COPIES = re.compile(r"cp\.(async|reduce)\b")
NEAR_READS = re.compile(r"(ld|atom)\.(shared|global|local)")
JUMP_TABLE = re.compile(r"(\$\w+):\s*\.branchtargets\s([^;]*);")
NO_ACCESS = re.compile(r"cp\.async\.(bulk\.)?(commit|wait|mbarrier)")


@dataclass(frozen=True)
class Order:
    waits: bool  # on every path before memory that others see is written, or the kernel left or stopped
    # Parameters whose memory is read before; None: an address of unknown origin
    early: frozenset[int | None]


@dataclass(frozen=True)
class Step:
    """One instruction, or a label."""

    predicate: str
    opcode: str
    operands: str

    @property
    def written(self) -> list[str]:
        """Returns the registers of the result."""
        if self.opcode.startswith(("st", "red", "bra", "cp", "bar", "mbarrier", "fence")):
            return []
        return REGISTER.findall(_first(self.operands))

    @property
    def read(self) -> list[str]:
        return REGISTER.findall(self.operands[len(_first(self.operands)) :])

    @property
    def addresses(self) -> list[str]:
        """Returns the registers within brackets."""
        return [r for at in re.findall(r"\[(.*?)\]", self.operands) for r in REGISTER.findall(at)]


def order(ptx: str) -> Order:
    start = ptx.index(".entry")
    body = ptx.index("{", start)
    pointers = {
        name: int(number)
        for kind, name, number in ENTRY_PARAMETER.findall(ptx[start:body])
        if ".ptr" in kind or ".b8" in kind
    }
    tables = {
        name: [target.strip() for target in targets.split(",")]
        for name, targets in JUMP_TABLE.findall(ptx[body:])
    }
    steps = list(_steps(JUMP_TABLE.sub("", ptx[body:])))
    origins = _origins(steps, pointers)
    labels = {step.opcode: place for place, step in enumerate(steps) if step.opcode.startswith("$")}
    jumps = _jumps(steps, labels, tables)
    early, seen, paths = set[int | None](), set[int](), [0]
    while paths:
        place = paths.pop()
        if place in seen:
            continue
        seen.add(place)
        step = steps[place]
        if step.opcode == "griddepcontrol.wait":
            continue
        if WRITES.match(step.opcode):
            return Order(False, frozenset(early))
        if _reads(step.opcode):
            early |= set().union(*(origins[r] for r in step.addresses)) or {None}
        paths += jumps.get(place, [])
        if step.predicate or not step.opcode.startswith(("bra", "brx")):
            paths.append(place + 1)
    return Order(True, frozenset(early))


def _jumps(
    steps: Sequence[Step], labels: Mapping[str, int], tables: Mapping[str, Sequence[str]]
) -> Mapping[int, list[int]]:
    """Returns where each branch may go, by its own place. Branches by which a worker warp of a specialized kernel leaves do
    not count. The warp loads the number of its next role from shared memory, and compares it or looks it up in a table of
    labels. The number that tells it to leave comes from the first warps at their own end: they have waited, and the block
    is there until they leave."""
    roles, comparisons = set[str](), set[str]()
    found: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        if step.opcode == "ld.shared.b8":
            roles.update(step.written)
        if step.opcode.startswith("setp.eq") and roles & set(step.read):
            comparisons.add("@" + _first(step.operands))
        if step.opcode.startswith("brx"):
            role, _, table = step.operands.partition(",")
            targets, by_role = tables[table.strip()], role in roles
        elif step.opcode.startswith("bra"):
            targets, by_role = [step.operands], step.predicate in comparisons
        else:
            continue
        # Labels without a dollar are those of waiting loops in inline assembly: the way back
        places = [labels[target] for target in targets if target.startswith("$")]
        found[place] = [to for to in places if not (by_role and _leaves_at(steps, to))]
    return found


def _leaves_at(steps: Sequence[Step], place: int) -> bool:
    behind = (step.opcode for step in steps[place:])
    return next(o for o in behind if o and o[0] not in "$.") == "ret"


def _reads(opcode: str) -> bool:
    if COPIES.match(opcode):
        return not NO_ACCESS.match(opcode)
    return bool(READS.match(opcode))


def _origins(steps: Sequence[Step], pointers: Mapping[str, int]) -> Mapping[str, set[int]]:
    """Returns the parameters from which each register comes."""
    flows = [
        (
            step.written,
            step.read,
            {pointers[n] for n in PARAMETER.findall(step.operands) if n in pointers},
        )
        for step in steps
        if not (_reads(step.opcode) or NEAR_READS.match(step.opcode))
    ]
    origins: dict[str, set[int]] = defaultdict(set)
    grown = True
    while grown:
        grown = False
        for written, read, named in flows:
            found = named.union(*(origins[register] for register in read))
            for register in written:
                grown |= not found <= origins[register]
                origins[register] |= found
    return origins


def _steps(body: str) -> Iterator[Step]:
    for line in body.splitlines():
        for text in line.partition("//")[0].split(";"):
            words = text.strip(" \t:").lstrip("{ \t").split(maxsplit=1)
            predicate = words.pop(0) if words and words[0].startswith("@") else ""
            opcode, _, operands = " ".join(words).partition(" ")
            yield Step(predicate, opcode, operands.strip())


def _first(operands: str) -> str:
    """Returns the operands up to the first comma outside of braces."""
    depth = 0
    for place, character in enumerate(operands):
        depth += (character in "{[") - (character in "}]")
        if character == "," and not depth:
            return operands[:place]
    return operands


def parameter_names(source: Any) -> list[str]:
    """Returns the names of a kernel's parameters, in order. A field of a NamedTuple has the name of the tuple and a dot before
    its own. A tensor descriptor is one parameter, and its shape and strides are further ones."""
    names: list[str] = []
    for name in source.fn.arg_names:
        names += _leaves(name, source.signature[name])
    return names


def _leaves(name: str, kind: Any) -> list[str]:
    if isinstance(kind, tuple):
        fields = getattr(kind, "_fields", range(len(kind)))
        return [
            leaf
            for field, part in zip(fields, kind, strict=True)
            for leaf in _leaves(f"{name}.{field}", part)
        ]
    if kind == "constexpr":
        return []
    described = re.match(r"tensordesc<[^\[]*\[([^\]]*)\]", str(kind))
    if described:
        return [name] * (1 + 2 * len(described[1].split(",")))
    return [name]
