"""Parity with `transformers` over HTTP: the same greedy tokens and logprobs.

Each configuration is tested with whole prompts, chunked prompts and cached prefixes, with both page sizes and both
loops, and with prompts of different lengths in one batch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import client, processes
from support.quantized_folders import Format, quantize_folder, write_dequantized
from support.reference import Continuation, Reference
from support.tiny_model import CONFIGS, write_tiny_model

Flags = dict[str, int]

LENGTHS = (1, 15, 16, 17, 100, 333)
NEW_TOKENS = 24
TOLERANCE = 1e-4  # of a logprob

# Two workers with different settings that must not change a token.
WHOLE: Flags = {"page_size": 16}
CHUNKED: Flags = {
    "page_size": 1,
    "chunked_prefill_size": 16,
    "disable_overlap_schedule": True,
}


def check(
    case: str,
    url: str,
    prompts: list[list[int]],
    expected: list[Continuation],
    cached: list[int] | None = None,
) -> None:
    """Sends all prompts at once. `cached`: the required number of cached tokens of each."""
    answers = asyncio.run(client.generate_all(url, prompts, NEW_TOKENS))
    for i, (answer, reference) in enumerate(zip(answers, expected, strict=True)):
        where = f"{case}, prompt of {len(prompts[i])} (margin {reference.margin:.1e})"
        assert answer.status == 200, f"{where}: {answer.body}"
        assert answer.prompt_tokens == len(prompts[i]), where
        assert answer.tokens == reference.tokens, where
        pairs = zip(answer.logprobs, reference.logprobs, strict=True)
        worst = max(abs(ours - theirs) for ours, theirs in pairs)
        assert worst <= TOLERANCE, f"{where}: logprob off by {worst:.2e}"
        if cached is not None:
            assert answer.cached_tokens == cached[i], where


def test_greedy_tokens_and_logprobs_are_those_of_transformers(tmp_path: Path) -> None:
    """`test_window_pages_when_memory_is_short` has Gemma 2, and test_images.py Qwen2."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    check_folder("v3", tmp_path, Reference(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "v3"])
def test_all_configs_with_all_settings(name: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    check_folder(name, tmp_path, Reference(tmp_path))


@pytest.mark.slow
def test_an_fp8_folder(tmp_path: Path) -> None:
    """FP8 weights. transformers loads the same values in float32."""
    kind = Format("block", (16, 24))
    write_tiny_model(tmp_path / "source", **CONFIGS["v3"])
    quantize_folder(tmp_path / "source", tmp_path / "fp8", kind)
    write_dequantized(tmp_path / "fp8", tmp_path / "plain", kind)
    check_folder("v3 in FP8", tmp_path / "fp8", Reference(tmp_path / "plain"), (CHUNKED,))


def test_window_pages_when_memory_is_short(tmp_path: Path) -> None:
    """All window pages that no request reads are taken, and requests are retracted."""
    write_tiny_model(tmp_path, **CONFIGS["gemma2"])
    reference, rng = Reference(tmp_path), random.Random(0)
    shared = [rng.randrange(reference.vocab_size) for _ in range(90)]
    prompts = [
        [*shared[:common], *(rng.randrange(reference.vocab_size) for _ in range(own))]
        for common, own in ((90, 110), (90, 3), (0, 250), (50, 100), (90, 40), (0, 333))
    ]
    expected = [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    flags = {"page_size": 1, "max_total_tokens": 360, "chunked_prefill_size": 32}
    with processes.together(processes.worker(tmp_path, **flags)) as (worker,):
        for _ in range(2):
            check("short of memory", worker.url, prompts, expected)


def check_folder(
    name: str, folder: Path, reference: Reference, settings: Sequence[Flags] = (WHOLE, CHUNKED)
) -> None:
    rng = random.Random(name)

    def random_tokens(length: int) -> list[int]:
        return [rng.randrange(reference.vocab_size) for _ in range(length)]

    prompts = [random_tokens(length) for length in LENGTHS]
    expected = [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    # A second turn goes on from the first answer, so it reads what decode steps wrote.
    turns = [p + e.tokens + random_tokens(7) for p, e in zip(prompts, expected, strict=True)]
    expected_turns = [reference.greedy(turn, NEW_TOKENS) for turn in turns]

    with processes.together(*(processes.worker(folder, **flags) for flags in settings)) as workers:
        for worker, flags in zip(workers, settings, strict=True):
            case, page = f"{name} {flags}", flags["page_size"]
            check(f"{case} cold", worker.url, prompts, expected)
            # The last token of a prompt is always computed: its logits give the first new token.
            warm = [(len(p) - 1) // page * page for p in prompts]
            check(f"{case} warm", worker.url, prompts, expected, warm)
            # The last token of an answer was sampled and never computed, so it is in no cache.
            held = [(len(p) + NEW_TOKENS - 1) // page * page for p in prompts]
            check(f"{case} second turn", worker.url, turns, expected_turns, held)
