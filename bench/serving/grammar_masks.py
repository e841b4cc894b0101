"""The time that grammars add to a step: from the scheduler's request for the masks of a batch until they arrive.

    python bench/serving/grammar_masks.py --out bench/results/grammar_masks.jsonl

The vocabulary is byte-level BPE of DeepSeek-V3's size (129,280 tokens), trained on this repository's
dependencies, or the one of `--tokenizer`. All rows follow the sentences of one schema, or of a schema
each. `random` sentences are drawn from the masks themselves: they stay in their first string, where
masks cost the most. `records` are filled with words, as a model would.

Two baselines take the same tokens in the same run: matchers in this process, one row after the other
(what xgrammar itself takes, without processes and threads), and what one would write first: each
token's bytes are tried against the same matcher, in Python.

What they add to a step of the scheduler, under whose forward pass they are made: `grammar_step.py`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from xgrammar import CompiledGrammar, GrammarMatcher

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import record
from shapes.tokenizer import write_tokenizer

from grammar_texts import VOCAB_SIZE, draw, grammar, open_all, records
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.pool import GrammarPool, start
from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler, Matcher

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Times:
    """Times of each step."""

    pool_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)  # wall
    alone_cpu_s: list[float] = field(default_factory=list)


def drive(
    pool: GrammarPool,
    keys: list[int],
    begin: Callable[[], Matcher],
    steps: int,
    texts: list[list[int]],
) -> Times:
    """Fill the masks of all rows, there and here in turns, while each goes on by the next token of
    its text; by a random one if there are no texts."""
    choose = random.Random(0)
    matchers = [begin() for _ in keys]
    masks = np.empty_like(pool.masks)
    new: list[list[int]] = [[] for _ in keys]
    times = Times()
    for step in range(steps):
        begun = time.perf_counter()
        failed = pool.fill(list(zip(keys, new, strict=True))).failed
        times.pool_s.append(time.perf_counter() - begun)
        assert not failed, failed
        begun, cpu = time.perf_counter(), time.process_time()
        for row, (matcher, tokens) in enumerate(zip(matchers, new, strict=True)):
            assert all(matcher.accept(token) for token in tokens), tokens
            matcher.fill(masks, row)
        times.alone_cpu_s.append(time.process_time() - cpu)
        times.alone_s.append(time.perf_counter() - begun)
        assert (masks == pool.masks).all(), "masks differ"
        for row in range(len(keys)):
            if texts:
                new[row] = [texts[row][step]]
                continue
            new[row] = [draw(masks[row], choose)]
    return times


def cpu_seconds(pool: GrammarPool) -> dict[int, float]:
    """Returns the CPU time of each grammar worker so far. They are children of one fork server."""
    seconds = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pool.processes.fork_server.pid:
            seconds[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return seconds


def python_mask(compiled: CompiledGrammar, samples: int) -> float:
    """Returns the seconds of one mask, computed token by token: extrapolated from at most `samples` tokens of the
    vocabulary."""
    matcher = GrammarMatcher(compiled)
    matcher.accept_string('[{"name": "A')
    vocab_size = compiled.tokenizer_info.vocab_size
    samples = min(samples, vocab_size - 1)
    tokens = random.Random(0).sample(range(1, vocab_size), samples)
    begun = time.perf_counter()
    for token in tokens:
        if matcher.accept_token(token):
            matcher.rollback(1)
    return (time.perf_counter() - begun) / samples * vocab_size


def measure(
    pool: GrammarPool,
    begin: Callable[[], Matcher],
    python_s: float,
    distinct: bool,
    steps: int,
    texts: list[list[int]],
) -> dict[str, Any]:
    """Measures one case. `python_s` is the time of a mask computed token by token."""
    rows = len(pool.masks)
    begun = time.perf_counter()
    keys = open_all(pool, [grammar(row if distinct else None) for row in range(rows)])
    open_s = time.perf_counter() - begun
    before = cpu_seconds(pool)
    times = drive(pool, keys, begin, steps, texts)
    after = cpu_seconds(pool)
    cpu = sum(after[pid] - before[pid] for pid in after.keys() & before.keys()) / steps
    for key in keys:
        pool.close(key)
    fill, one_by_one = statistics.median(times.pool_s), statistics.median(times.alone_s)
    return {
        "open_all_s": round(open_s, 3),
        "fill_p50_us": round(fill * 1e6),
        "fill_p99_us": round(np.quantile(times.pool_s, 0.99) * 1e6),
        "one_by_one_p50_us": round(one_by_one * 1e6),
        "times_faster_than_one_by_one": round(one_by_one / fill, 2),
        "cpu_us_per_row": round(cpu * 1e6 / rows, 1),
        "one_by_one_cpu_us_per_row": round(statistics.mean(times.alone_cpu_s) * 1e6 / rows, 1),
        "times_faster_than_python": round(python_s * rows / fill),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    rows, steps = arguments.rows, arguments.steps
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.tokenizer or Path(name)
        if arguments.tokenizer is None:
            write_tokenizer(folder, VOCAB_SIZE)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocab_size = tokenizer.get_vocab_size()
        # Without jump-forward decoding every mask is written in full.
        options = GrammarOptions(jump_forward=False)
        pool = start(folder, vocab_size=vocab_size, max_rows=rows, options=options)
        try:
            compiler = Compiler(read_vocabulary(folder, vocab_size))
            alone = compiler.compile(grammar())
            python_s = python_mask(alone, 5000)
            open_all(pool, [grammar()])  # the fork server has loaded
            texts = [records(tokenizer, steps, random.Random(row)) for row in range(rows)]

            def begin() -> Matcher:
                return compiler.begin(grammar(), alone)

            results = {
                f"{kind}, {'a schema each' if distinct else 'one schema'}": measure(
                    pool, begin, python_s, distinct, steps, of_kind
                )
                for kind, of_kind in (("records", texts), ("random", []))
                for distinct in (False, True)
            }
        finally:
            pool.shut_down()
    print(f"{'':24}{'p50':>9}{'p99':>9}{'one by one':>12}{'CPU/row':>9}{'Python':>12}")
    for case, result in results.items():
        print(
            f"{case:24}{result['fill_p50_us']:>6} us{result['fill_p99_us']:>6} us"
            f"{result['times_faster_than_one_by_one']:>11}x{result['cpu_us_per_row']:>6} us"
            f"{result['times_faster_than_python']:>11}x"
        )
    config = {"rows": rows, "steps": steps, "vocab_size": vocab_size}
    python_us = {"python_us_per_row": round(python_s * 1e6)}
    record("grammar_masks", {"config": config, **python_us, **results}, arguments.out)


if __name__ == "__main__":
    main()
