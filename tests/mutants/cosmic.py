"""Mutants of Python sources; runs under a Python that has cosmic-ray.

    python cosmic.py list FILE...    print them all as JSON
    python cosmic.py text FILE OPERATOR OCCURRENCE
                                     print the text of the mutated file

A mutant is a list: file, operator, occurrence of the operator in the file, line, column.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# `|` stands in annotations, which nobody evaluates. A removed decorator is mostly a dataclass or a property, without
# which no test passes. Equal small numbers are identical in CPython.
LEFT_OUT = ("BinaryOperator_BitOr", "RemoveDecorator", "_Eq_Is", "_NotEq_IsNot")
# `strict` of a zip, as `frozen` and `slots` of a dataclass, guards against misuse; the other is for the log.
GUARDS = ("strict=", "exc_info=")


def mutants(file: str) -> Iterator[tuple[str, str, int, int, int]]:
    lines = Path(file).read_text().splitlines()
    nodes = list(ast_nodes(get_ast_from_path(Path(file))))
    for name in sorted(operator_names()):
        operator_class = get_operator(name)
        if operator_class.arguments() or any(part in name for part in LEFT_OUT):
            continue
        operator = operator_class()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(places):
            before = lines[line - 1][:column]
            if not before.startswith("@dataclass") and not before.endswith(GUARDS):
                yield file, name, occurrence, line, column


def text(file: str, operator: str, occurrence: int) -> str:
    mutated = mutate_code(Path(file).read_text(), get_operator(operator)(), occurrence)
    assert mutated is not None, (file, operator, occurrence)
    return mutated


if sys.argv[1] == "list":
    print(json.dumps([mutant for file in sys.argv[2:] for mutant in mutants(file)]))
else:
    print(text(sys.argv[2], sys.argv[3], int(sys.argv[4])), end="")
