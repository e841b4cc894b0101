"""Trained models behind OpenAI's client: right answers about held-out pictures, videos, sums and lists."""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs Pillow: requirements.lock has it")
pytest.importorskip("av", reason="needs PyAV: requirements.lock has it")

import ask_gemma2
import ask_pictures
from pictures.tasks import TASKS
from tasks import OF_GEMMA2

from support import processes

TRAINED = Path(__file__).resolve().parents[2] / "bench" / "accuracy" / "trained"
MIN_SHARE = 0.95  # share of right answers to each task
PARALLEL = 16


@pytest.mark.slow
def test_pictures_and_videos_of_llava_onevision() -> None:
    """Also: the second time a picture is cached, and two pictures of one size are not mixed up."""
    args = argparse.Namespace(seed=1, questions=20, pairs=4, parallel=PARALLEL)
    with processes.worker(TRAINED / "llava_onevision") as worker:
        result = asyncio.run(ask_pictures.measure(worker.url, args))
    assert set(result["right"]) == set(TASKS)
    assert min(result["right"].values()) >= MIN_SHARE, result
    assert result["mixed_up"] == 0, result
    assert result["least_cached"] > 0, result


@pytest.mark.slow
def test_sums_and_lists_of_gemma2() -> None:
    """Every second layer sees 32 tokens, fewer than most lists have."""
    draw = random.Random("test")
    with processes.worker(TRAINED / "gemma2") as worker:
        for name, (maker, _) in OF_GEMMA2.items():
            asked = ask_gemma2.questions(draw, maker, 100)
            right = asyncio.run(ask_gemma2.share_right(worker.url, asked, PARALLEL))
            assert right >= MIN_SHARE, name
