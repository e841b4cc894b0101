"""The overload bench runs and counts every request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import ROOT


@pytest.mark.slow
def test_every_request_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "line.jsonl"
    flags = ["--seconds=1", "--loads=1,2", "--long-tokens=200", "--workers=1", f"--out={out}"]
    command = [sys.executable, str(ROOT / "bench/serving/overload.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(out.read_text())
    assert line["capacity_per_s"] > 0
    assert [(row["load"], row["kind"]) for row in line["loads"]] == [
        (1, "short"),
        (1, "long"),
        (2, "short"),
        (2, "long"),
    ]
    assert all(
        row["ends"].get("answered", 0) > 0 for row in line["loads"] if row["kind"] == "short"
    )
