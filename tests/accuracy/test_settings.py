"""bench/accuracy/settings.py, and with it run.py: answers are right, and those that differ are seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import settings
from run import Answer


@pytest.mark.slow
def test_a_model_of_random_weights_answers_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(settings, "SETTINGS", {"defaults": {}, "random": {"load_format": "dummy"}})
    out = tmp_path / "accuracy.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["settings.py", "--num-questions=4", "--num-shots=2", f"--out={out}"]
    )
    assert settings.main() == 1
    defaults, other = map(json.loads, out.read_text().splitlines())
    assert (defaults["accuracy"], defaults["invalid"], defaults["differ"]) == (1.0, 0.0, 0)
    assert defaults["config"] == {"questions": 4, "shots": 2, "flags": {}}
    assert defaults["output_throughput"] > 0
    assert (other["accuracy"], other["differ"]) == (0.0, 4)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 3 + 4 = 7. The answer is 7.", "7"),
        (" The answer is -12", "-12"),
        (" I do not know.", None),
        (" 7.", "7"),
        ("", None),
    ],
)
def test_what_an_answer_comes_to(text: str, number: str | None) -> None:
    assert Answer(text, tokens=9, cached_tokens=0).number == number
