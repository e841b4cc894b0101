"""The benches of speculative decoding: accepted drafts are as many as set, and both run with the small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import draft_choice
import speculation
from mla_router.worker.config import SMALL_MODEL

SMALL = [f"--model-path={SMALL_MODEL}", "--device=cpu", "--dtype=float32", "--context-length=256"]
LIMITS = ["--max-total-tokens=1024", "--max-running-requests=2"]


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: Any) -> dict[str, Any]:
    bench, flags = request.param
    out = tmp_path / "line.jsonl"
    monkeypatch.setattr(sys, "argv", ["x", *SMALL, *LIMITS, *flags.split(), f"--out={out}"])
    bench.main()
    line: dict[str, Any] = json.loads(out.read_text())
    return line


STEPS = "--batch-size 2 --drafts 0 2 --acceptance 0 1 --input-len 8 --steps 3 --prompts 4"
SERVED = "--batch-size 2 --acceptance 0 --input-len 4 --output-len 16"


@pytest.mark.parametrize("result", [(speculation, STEPS)], indirect=True, ids=["steps"])
def test_steps_give_as_many_tokens_as_drafts_are_right(result: dict[str, Any]) -> None:
    rows = [(row["drafts"], row["acceptance"], row["tokens"]) for row in result["rows"]]
    assert rows == [(0, 0, 1), (2, 0, 1), (2, 1, 3)]
    assert [row["drafts"] for row in result["prompts"]] == [0, 2]


@pytest.mark.parametrize("result", [(draft_choice, SERVED)], indirect=True, ids=["served"])
def test_answers_are_served_with_the_choice_and_without(result: dict[str, Any]) -> None:
    assert [row["chosen"] for row in result["rows"]] == [False, True]
    assert all(row["tokens_per_s"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_two_ranks_run_the_same_steps(tmp_path: Path) -> None:
    """In processes of their own: that of rank 0 ends without its teardown."""
    out = tmp_path / "line.jsonl"
    flags = [*SMALL, *LIMITS, *STEPS.split(), "--tp-size=2", f"--out={out}"]
    subprocess.run([sys.executable, speculation.__file__, *flags], check=True, timeout=300)
    rows = [(row["drafts"], row["tokens"]) for row in json.loads(out.read_text())["rows"]]
    assert rows == [(0, 1), (2, 1), (2, 3)]
