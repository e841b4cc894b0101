"""The router's overload bench, small: what cannot be served is refused with a 429, and the rest is served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.binaries import build_binaries
from support.processes import ROOT


def test_four_times_the_capacity_is_served_or_refused(tmp_path: Path) -> None:
    out, picture = tmp_path / "results.jsonl", tmp_path / "overload.svg"
    sizes = ["--loads", "0.5", "4", "--seconds", "1.5", "--burners", "0", "--patience", "60"]
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "bench/router/overload.py", *sizes, "--peers"),
            *("--binaries", build_binaries(), "--out", out),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(out.read_text())
    assert done.stdout.splitlines()[-1] == out.read_text().strip()
    below, above = result["rows"]
    assert set(below["ends"]) == {"200"}
    assert set(above["ends"]) == {"200", "429"}
    assert above["goodput"] > below["goodput"]
    for row in result["rows"]:
        assert set(row["probe_statuses"]) == {"200"}
    # Two engines with eight places need 2.6 s for the requests in the router's queue and in their own queues.
    assert 1 <= above["retry_after_s"] <= 30
    plot = [sys.executable, ROOT / "bench/router/overload_plot.py", "--results", out]
    subprocess.run([*plot, "--out", picture], check=True)
    assert picture.read_text().count("<circle") == len(result["rows"])
