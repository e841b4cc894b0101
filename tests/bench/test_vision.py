"""The bench of the vision tower gives a figure of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import ROOT
from support.tiny_llava import write_tiny_llava


@pytest.mark.slow
def test_a_small_model(tmp_path: Path) -> None:
    write_tiny_llava(tmp_path / "model", processor=False)
    out = tmp_path / "line.jsonl"
    sizes = ["--batch-size", "3", "--input-len", "20", "--output-len", "8", "--tiles", "1", "3"]
    command = ["bench/serving/vision.py", *sizes, "--device=cpu", f"--out={out}"]
    subprocess.run(
        [sys.executable, *command, f"--model-path={tmp_path / 'model'}"], cwd=ROOT, check=True
    )
    line = json.loads(out.read_text())
    rows, prompts = line["rows"], line["prompts"]
    assert {name for name in prompts if prompts[name] > 0} == {
        "prompt_rows",
        "text_ms",
        "text_beside_ms",
        "image_ms",
        "image_beside_ms",
    }
    assert [row["tiles"] for row in rows] == [0, 1, 3]
    assert all(row["step_ms"] > 0 for row in rows)
    assert all(row["tiles_per_s"] > 0 and row["tiles_per_s_beside"] > 0 for row in rows[1:])
