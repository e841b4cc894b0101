"""bench/accuracy/kl.py: a token is as probable however its context got into the cache."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys

import kl
import pytest

from support import processes

PAGE, CHUNK = 16, 16


def test_the_small_model_by_every_way() -> None:
    """Two servers that compute the same prompts in steps of other sizes, over other pages."""
    whole = processes.worker(page_size=PAGE)
    chunked = processes.worker(page_size=1, chunked_prefill_size=CHUNK)
    prompts = [question.prompt for question in kl.questions(shots=1, count=2, seed=0)]
    with processes.together(whole, chunked) as (first, second):
        rows = asyncio.run(
            kl.measure([first.url, second.url], prompts=prompts, new_tokens=40, piece=24)
        )
        command = [sys.executable, str(processes.ROOT / "bench/accuracy/kl.py")]
        command += ["--urls", first.url, "--num-prompts=1", "--num-shots=0", "--new-tokens=4"]
        good = subprocess.run(command, capture_output=True, text=True, check=False)
        bad = subprocess.run([*command, "--max-difference=-1"], capture_output=True, check=False)
    assert [row.path.partition(" ")[2] for row in rows] == 2 * [
        "prefilled",
        "cached",
        "in pieces of 24",
    ]
    for row in rows:
        assert 0 < row.max_difference <= 1e-4, row
        assert 0 <= row.kl <= 1e-8, row
        assert (row.cached_tokens > 0) != ("prefilled" in row.path), row
    assert good.returncode == 0, good.stderr
    assert good.stdout.splitlines()[-1].startswith('{"bench": "kl"')
    assert bad.returncode == 1, bad.stderr


def test_the_estimate_is_the_divergence() -> None:
    """Tokens in the proportions of p: the mean is KL(p || q) exactly."""
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    drawn = [0, 0, 1, 2]
    sample = kl.Sample([0], drawn, [math.log(p[x]) for x in drawn])
    row = kl.compare("q", [sample], [kl.Scored([math.log(q[x]) for x in drawn], 0)])
    assert row.kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert row.max_difference == pytest.approx(math.log(2))
    assert row.mean_difference == pytest.approx(math.log(2) * 3 / 4)
