"""Reads ShareGPT's conversations. As in SGLang's benchmark, only the first two turns are used.

The limits of lengths are those of SGLang's `bench_serving.py` (0.4.0).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from loadgen.tokens import Vocabulary
from loadgen.workload import Conversation, Turn, WorkloadError

MIN_TOKENS = 4  # of question and of answer
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048


def read(path: Path | None) -> list[tuple[str, str]]:
    """Returns the first question and answer of every conversation that has both. Raises `WorkloadError`."""
    if path is None:
        raise WorkloadError("--dataset-path: name ShareGPT's JSON file; nothing is downloaded")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        pairs = [
            (str(turns[0]["value"]), str(turns[1]["value"]))
            for turns in (entry["conversations"] for entry in entries)
            if len(turns) >= 2
        ]
    except OSError as error:
        raise WorkloadError(f"--dataset-path: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(
            f"--dataset-path: {path} is not in ShareGPT's form: {error!r}"
        ) from None
    if not pairs:
        raise WorkloadError(f"--dataset-path: {path} has no conversation of two turns")
    return pairs


def conversations(
    vocabulary: Vocabulary,
    rng: random.Random,
    pairs: list[tuple[str, str]],
    count: int,
    output_tokens: int | None,
) -> list[Conversation]:
    """Returns at most `count` questions. The answers have as many tokens as in the file, or `output_tokens`."""
    found: list[Conversation] = []
    for question, answer in rng.sample(pairs, len(pairs)):
        if len(found) == count:
            break
        prompt = vocabulary.encode(question)
        output = output_tokens or len(vocabulary.encode(answer).ids)
        tokens = len(prompt.ids)
        too_long = tokens > MAX_PROMPT_TOKENS or (
            output_tokens is None and tokens + output > MAX_TOTAL_TOKENS
        )
        if min(tokens, output) >= MIN_TOKENS and not too_long:
            found.append((Turn(prompt, output),))
    if not found:
        raise WorkloadError("--dataset-path: every conversation is too short or too long")
    return found
