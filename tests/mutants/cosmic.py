"""Mutants of Python sources: runs under a Python that has cosmic-ray, in the folder whose files it changes.

    python cosmic.py count WANTED     print how many there are
    python cosmic.py run WANTED       print the outcomes of those that are chosen, as JSON

WANTED is JSON: `areas` (each `sources` and the `command` that tests them), `files` (all, if empty), `timeout` in
seconds, and for `run` the numbers that are `chosen`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec


def mutants(wanted: dict[str, Any]) -> list[tuple[MutationSpec, str]]:
    """Each with the command that tests it, in the order of the sources."""
    found = []
    for area in wanted["areas"]:
        sources = [Path(source) for source in area["sources"]]
        files = [f for s in sources for f in (sorted(s.rglob("*.py")) if s.is_dir() else [s])]
        files = [f for f in files if not wanted["files"] or str(f) in wanted["files"]]
        with (
            tempfile.TemporaryDirectory() as folder,
            use_db(str(Path(folder) / "session"), WorkDB.Mode.create) as session,
        ):
            init(files, session, {})
            specs = [spec for item in session.work_items for spec in item.mutations]
        # `|` stands in annotations, which nobody evaluates
        specs = [spec for spec in specs if "BinaryOperator_BitOr" not in spec.operator_name]
        specs.sort(key=lambda spec: (str(spec.module_path), spec.start_pos, spec.operator_name))
        found += [(spec, area["command"]) for spec in specs]
    return found


def main() -> None:
    action, wanted = sys.argv[1], json.loads(sys.argv[2])
    found = mutants(wanted)
    if action == "count":
        print(len(found))
        return
    outcomes = []
    for number in wanted["chosen"]:
        spec, command = found[number]
        result = mutate_and_test([spec], command, wanted["timeout"])
        name = f"{spec.module_path}:{spec.start_pos[0]}: {spec.operator_name}"
        outcome = result.test_outcome.value if result.test_outcome else "no-test"
        print(f"{outcome:11} {name}", file=sys.stderr, flush=True)
        outcomes.append({"name": name, "outcome": outcome})
    print(json.dumps(outcomes))


main()
