"""Computes the figures of a run from its outcomes, under SGLang's names.

Only successful requests count. E2E is the time from sending to the end of the answer; TTFT that to the first text.
TPOT is (E2E - TTFT) / (tokens - 1) for each request. ITL are the gaps between events with text, over all requests.
"Concurrency" is the mean number of open requests.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from loadgen.client import Outcome

PERCENTILES = (90, 95, 99)
MAX_ERRORS = 20  # limit of reported errors


def summarise(
    outcomes: list[Outcome], duration: float, count_tokens: Callable[[list[str]], int]
) -> dict[str, Any]:
    """Returns the results of a run of `duration` seconds. `count_tokens` counts the tokens of texts, also for servers
    that send no counts."""
    good = [outcome for outcome in outcomes if outcome.ok]
    retokenized = count_tokens([outcome.answer.text for outcome in good])
    counted = [o.answer.output_tokens for o in good if o.answer.output_tokens is not None]
    all_counted = len(counted) == len(good)
    generated = sum(counted) if all_counted else retokenized
    prompt = sum(
        o.prompt_tokens if o.answer.prompt_tokens is None else o.answer.prompt_tokens for o in good
    )
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(o.error for o in outcomes if o.error).most_common(MAX_ERRORS)),
        "duration": duration,
        "total_input_tokens": prompt,
        "total_output_tokens": generated,
        "total_output_tokens_retokenized": retokenized,
        "counted_by_server": all_counted,
        "other_length_than_asked": sum(
            o.answer.output_tokens not in (None, o.asked_tokens) for o in good
        ),
        "request_throughput": len(good) / duration,
        "input_throughput": prompt / duration,
        "output_throughput": generated / duration,
        "total_throughput": (prompt + generated) / duration,
        "concurrency": sum(o.latency for o in good) / duration,
        **_cached(good),
        **_spread("e2e_latency", (o.latency for o in good)),
    }
    streamed = [o for o in good if o.ttft is not None]
    if streamed:
        gaps = np.concatenate([np.frombuffer(o.gaps or array("d")) for o in streamed])
        result |= _spread("ttft", (o.ttft for o in streamed if o.ttft is not None))
        result |= _spread("tpot", filter(None, map(_tpot, streamed)))
        result |= _spread("itl", gaps)
    return result


def by_turn(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Returns TTFT and cached tokens of the first, second, ... turns of conversations."""
    rows = []
    for turn in range(1 + max((o.turn for o in outcomes), default=0)):
        good = [o for o in outcomes if o.turn == turn and o.ok]
        ttfts = [o.ttft for o in good if o.ttft is not None]
        rows.append(
            {
                "turn": turn + 1,
                "completed": len(good),
                **_cached(good),
                "median_ttft_ms": float(np.median(ttfts)) * 1e3 if ttfts else None,
            }
        )
    return rows


def _tpot(outcome: Outcome) -> float | None:
    tokens = outcome.answer.output_tokens
    if tokens is None or tokens < 2 or outcome.ttft is None:
        return None
    return (outcome.latency - outcome.ttft) / (tokens - 1)


def _cached(good: list[Outcome]) -> dict[str, Any]:
    """Returns the share of cached tokens of the requests with a count of them; None if there is none."""
    told = [
        (o.answer.cached_tokens, o.answer.prompt_tokens)
        for o in good
        if o.answer.cached_tokens is not None and o.answer.prompt_tokens
    ]
    cached, prompt = (sum(column) for column in zip(*told, strict=True)) if told else (None, None)
    return {
        "cached_tokens": cached,
        "cached_share": cached / prompt if cached is not None and prompt else None,
    }


def _spread(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """Returns statistics of `seconds` in milliseconds; None without values."""
    values = np.fromiter(seconds, dtype=np.float64) * 1e3
    names = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms"]
    names += [f"p{percent}_{name}_ms" for percent in PERCENTILES] + [f"max_{name}_ms"]
    if not values.size:
        return dict.fromkeys(names)
    figures = [values.mean(), np.median(values), values.std()]
    figures += [*np.percentile(values, PERCENTILES), values.max()]
    return dict(zip(names, map(float, figures), strict=True))
