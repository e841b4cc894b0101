"""bench/accuracy/kl.py: a token is as probable however its context got into the cache."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import kl
import pytest

from support import processes
from support.processes import Running
from support.tiny_model import CONFIGS, raw_config


def test_the_small_model_by_every_way(small_worker: str, other_worker: Running) -> None:
    """Two servers that compute the same prompts in steps of other sizes, over other pages."""
    prompts = [question.prompt for question in kl.questions(shots=1, count=2, seed=0)]
    samples = asyncio.run(kl.draw(small_worker, prompts, new_tokens=40))
    rows = [
        row
        for url in (small_worker, other_worker.url)
        for row in asyncio.run(kl.measure(url, samples, piece=24, name=url))
    ]
    strict = run_script("--urls", small_worker, "--max-difference=-1")
    assert [row.path.partition(" ")[2] for row in rows] == 2 * [
        "prefilled",
        "cached",
        "in pieces of 24",
    ]
    for row in rows:
        assert 0 < row.max_difference <= 1e-4, row
        assert 0 <= row.kl <= 1e-8, row
        assert (row.cached_tokens > 0) != ("prefilled" in row.path), row
    assert strict.returncode == 1, strict.stderr


@pytest.mark.slow
def test_a_folder_with_nothing_but_a_config(tmp_path: Path) -> None:
    """Workers of its own, random weights, and a tokenizer that knows fewer tokens than the model."""
    config = raw_config(CONFIGS["v2_lite"]) | {"vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run_script("--model-path", str(tmp_path), "--load-format=dummy", "--piece=16")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["path"] for row in rows] == [
        f"{name}, {way}"
        for name in ("as set", "chunks of 16")
        for way in ("prefilled", "cached", "in pieces of 16")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(processes.ROOT / "bench/accuracy/kl.py"), *flags]
    command += ["--num-prompts=1", "--num-shots=0", "--new-tokens=4"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_estimate_is_the_divergence() -> None:
    """Tokens in the proportions of p: the mean is KL(p || q) exactly."""
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    drawn = [0, 0, 1, 2]
    sample = kl.Sample([0], drawn, [math.log(p[x]) for x in drawn])
    row = kl.compare("q", [sample], [kl.Scored([math.log(q[x]) for x in drawn], 0)])
    assert row.kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert row.max_difference == pytest.approx(math.log(2))
    assert row.mean_difference == pytest.approx(math.log(2) * 3 / 4)
