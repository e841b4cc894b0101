"""Trained models behind OpenAI's client: right answers about held-out pictures, videos, sums and lists."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs Pillow: requirements.lock has it")
pytest.importorskip("av", reason="needs PyAV: requirements.lock has it")

import ask_gemma2
import ask_pictures
from pictures.tasks import TASKS
from tasks import OF_GEMMA2

from support import processes
from support.processes import Running

TRAINED = Path(__file__).resolve().parents[2] / "bench" / "accuracy" / "trained"
LEAST = 0.95  # share of right answers to each task
QUESTIONS = 40  # of each task
PARALLEL = 16


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Running]]:
    """LLaVA-OneVision and Gemma 2."""
    folders = [TRAINED / "llava_onevision", TRAINED / "gemma2"]
    with processes.together(*map(processes.worker, folders)) as running:
        yield running


def test_pictures_and_videos(workers: list[Running]) -> None:
    """Also: the second time a picture is cached, and two pictures of one size are not mixed up."""
    args = argparse.Namespace(seed=1, questions=QUESTIONS, pairs=5, parallel=PARALLEL)
    result = asyncio.run(ask_pictures.measure(workers[0].url, args))
    assert set(result["right"]) == set(TASKS)
    assert min(result["right"].values()) >= LEAST, result
    assert result["mixed_up"] == 0, result
    assert result["least_cached"] > 0, result


@pytest.mark.parametrize("name", OF_GEMMA2)
def test_sums_and_lists_of_gemma2(workers: list[Running], name: str) -> None:
    """Every second layer sees 32 tokens only; the lists are longer."""
    maker, _ = OF_GEMMA2[name]
    asked = ask_gemma2.questions(random.Random(f"test {name}"), maker, QUESTIONS)
    right = asyncio.run(ask_gemma2.share_right(workers[1].url, asked, PARALLEL))
    assert right >= LEAST
