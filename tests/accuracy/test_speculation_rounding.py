"""bench/accuracy/speculation_rounding.py: gaps and differences at the first other token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import speculation_rounding
import torch
from speculation_rounding import Answers, Asked, compare, scores

from mla_router.worker.generation import SamplingParams


def test_gaps_at_the_first_other_token() -> None:
    first = torch.tensor([3.0, 1.0, 0.0])
    near, moved = torch.tensor([1.0, 0.75, -9.0]), torch.tensor([0.5, 0.875, -9.0])
    a = Answers([[0, 0, 2]], [[first, near, first]])
    b = Answers([[0, 1, 2]], [[first, moved, first]])
    summary, (row,) = compare([Asked([7, 7], SamplingParams(3))], a, b)
    # The third token follows another one, and is not compared
    assert (summary["differ"], summary["equal_share"], summary["tokens_compared"]) == (1, 0, 2)
    assert (summary["logits_differ_median"], summary["logits_differ_max"]) == (0.25, 0.5)
    assert (row["index"], row["tokens"]) == (1, [0, 1])
    assert (row["gap"], row["gap_other"], row["logits_differ_by"]) == (0.25, 0.375, 0.5)


def test_scores_have_the_noise_of_the_position() -> None:
    logits = torch.zeros(50)
    asked = Asked([1], SamplingParams(3, temperature=0.5, seed=4))
    assert torch.equal(scores(logits, asked, 3), scores(logits, asked, 3))
    assert not torch.equal(scores(logits, asked, 3), scores(logits, asked, 4))
    shifted = scores(logits + 1, asked, 3) - scores(logits, asked, 3)
    assert shifted == pytest.approx(2.0 * torch.ones(50))


@pytest.mark.slow
def test_in_float32_nothing_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "rounding.jsonl"
    argv = (
        f"x --device=cpu --dtype=float32 --num-questions=4 --num-shots=1 --parallel=4 --out={out}"
    )
    monkeypatch.setattr(sys, "argv", argv.split())
    speculation_rounding.main()
    found = json.loads(out.read_text())
    for name in ("repeated", "batch size", "drafts"):
        assert (found[name]["answers"], found[name]["differ"]) == (4, 0)
    assert found["drafts"]["tokens_compared"] > 200
    assert found["from_float32"]["with drafts"]["max"] < 1e-3
    (traced,) = found["traced"]
    assert traced["repeats"]
    assert traced["logits_differ_by"] < 1e-3
