"""The time that grammars add to a decode step: the real scheduler, with a device that takes `--step-ms` a step.

    python bench/serving/grammar_step.py --out bench/results/grammar_step.jsonl

All rows follow one JSON schema, or one schema each, in a vocabulary of DeepSeek-V3's size. Their tokens are known:
`records` as a model would write them, or drawn at `random` from the masks. The masks of a step need the tokens of the
step before. They are computed during its forward pass, and sampling waits for them. The added time is the difference
to the same step without grammars.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import record
from shapes.tokenizer import write_tokenizer

from grammar_texts import VOCAB_SIZE, grammar, open_all, random_sentence, records
from mla_router.worker.config import WorkerConfig
from mla_router.worker.generation import SamplingParams
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.pool import GrammarPool, start
from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler
from mla_router.worker.messages import Generate, Grammar
from mla_router.worker.scheduler.channel import ZmqChannel
from mla_router.worker.scheduler.scheduler import Scheduler
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan, TokenMasks
from mla_router.worker.step.result import StepResult
from null_worker import Timed

PAGE_SIZE = 16


class PacedReader:
    """A device with a constant step time. The prompt of request i is [i], its answer is texts[i]."""

    def __init__(self, capacity: Capacity, step_s: float, texts: list[list[int]]) -> None:
        self.capacity = capacity
        self._step_s = step_s
        self._texts = texts
        self._text_of: dict[int, int] = {}  # by slot
        self._free_at = 0.0  # time at which the device has completed all launched steps
        self._uploaded = np.empty((capacity.num_slots, -(-VOCAB_SIZE // 32)), dtype=np.int32)

    def forward(self, plan: StepPlan) -> StepPlan:
        for chunk in plan.chunks:
            self._text_of[chunk.slot] = chunk.tokens[0]
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        return plan

    def sample(self, forward_output: StepPlan, masks: TokenMasks | None = None) -> Timed:
        if masks is not None:
            self._uploaded[: len(masks.bits)] = masks.bits
        # The device waits for late masks.
        self._free_at = max(self._free_at, time.monotonic())
        # A prompt has one token, so an answer has one token less than its row of the cache.
        written = [length - 1 for length in forward_output.decode_bounds] + [0] * len(
            forward_output.chunks
        )
        tokens = [
            [self._texts[self._text_of[slot]][count]]
            for slot, count in zip(forward_output.sampled_slots, written, strict=True)
        ]
        return Timed(StepResult(tokens), self._free_at)

    def is_usable_after(self, error: Exception) -> bool:
        raise error


def step_us(
    folder: Path,
    pool: GrammarPool,
    texts: list[list[int]],
    grammars: Sequence[Grammar | None],
    step_s: float,
) -> list[float]:
    """Returns the microseconds between the ends of decode steps with all rows."""
    rows, steps = len(texts), len(texts[0])
    pages = rows * (2 + steps // PAGE_SIZE)
    capacity = Capacity(pages, PAGE_SIZE, rows, 1 << 20)
    context = zmq.Context()
    heard, said = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (heard, said):
        socket.set_hwm(0)
    heard.bind(f"ipc://{folder}/to_server_0")
    channel = ZmqChannel(folder)
    said.connect(f"ipc://{folder}/to_scheduler")
    engine = PacedReader(capacity, step_s, texts)
    scheduler = Scheduler(engine, channel, WorkerConfig(), vocab_size=VOCAB_SIZE, grammars=pool)
    for row, own in enumerate(grammars):
        sampling = SamplingParams(max_tokens=steps)
        said.send(msgspec.msgpack.encode(Generate(f"row-{row}", [row], sampling, grammar=own)))
    ends: list[float] = []
    last: Step | None = None
    while not ends or scheduler.requests:
        scheduler.receive(in_flight=last is not None)
        step = scheduler.forward(scheduler.next_step())
        if last is not None:
            scheduler.postprocess(last)
            if len(last.decodes) == rows:
                ends.append(time.perf_counter())
        last = scheduler.sample(step)
    channel.close()
    context.destroy(linger=0)
    return [1e6 * (end - begin) for begin, end in itertools.pairwise(ends)]


def texts_of(folder: Path, rows: int, steps: int) -> dict[str, list[list[int]]]:
    """Returns the tokens of each row, as a model would write them and drawn from the masks."""
    compiler = Compiler(read_vocabulary(folder, VOCAB_SIZE))
    one = grammar()
    compiled = compiler.compile(one)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {
        "records": [records(tokenizer, steps, random.Random(row))[:steps] for row in range(rows)],
        "random": [
            random_sentence(compiler.begin(one, compiled), VOCAB_SIZE, steps, random.Random(row))
            for row in range(rows)
        ],
    }


def figures(times: list[float], plain_us: float | None) -> dict[str, float]:
    """Returns the figures of a case. `plain_us`: the mean of the case without grammars; None: this is it."""
    mean = statistics.mean(times)
    return {
        "mean_us": round(mean, 1),
        "p50_us": round(statistics.median(times), 1),
        "p99_us": round(float(np.quantile(times, 0.99)), 1),
        "added": 0.0 if plain_us is None else round(mean / plain_us - 1, 4),
    }


def measure(folder: Path, rows: int, steps: int, step_s: float) -> dict[str, dict[str, float]]:
    """Prints and returns the figures of all cases. `folder` has the tokenizer."""
    one, each = grammar(), [grammar(row) for row in range(rows)]
    cases: dict[str, tuple[str, Sequence[Grammar | None]]] = {
        "no grammar": ("records", [None] * rows),
        "records, one schema": ("records", [one] * rows),
        "records, a schema each": ("records", each),
        "random, one schema": ("random", [one] * rows),
        "random, a schema each": ("random", each),
    }
    results: dict[str, dict[str, float]] = {}
    # Without jump-forward decoding every mask is written in full.
    options = GrammarOptions(jump_forward=False)
    pool = start(folder, vocab_size=VOCAB_SIZE, max_rows=rows, options=options)
    try:
        texts = texts_of(folder, rows, steps)
        print(f"{'':24}{'mean':>10}{'p50':>10}{'p99':>10}{'added':>8}")
        for case, (kind, grammars) in cases.items():
            # Compiled first, or the first answers would end before the last grammar is ready.
            for key in open_all(pool, [one for one in grammars if one is not None]):
                pool.close(key)
            with tempfile.TemporaryDirectory() as sockets:
                times = step_us(Path(sockets), pool, texts[kind], grammars, step_s)
            plain = results.get("no grammar", {})
            line = results[case] = figures(times, plain.get("mean_us"))
            print(
                f"{case:24}{line['mean_us']:7.0f} us{line['p50_us']:7.0f} us"
                f"{line['p99_us']:7.0f} us{line['added']:8.1%}",
                flush=True,
            )
    finally:
        pool.shut_down()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=2.0, help="what a forward pass takes")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.tokenizer or Path(name)
        if args.tokenizer is None:
            print(f"training a tokenizer of {VOCAB_SIZE} tokens: a minute", flush=True)
            write_tokenizer(folder, VOCAB_SIZE)
        results = measure(folder, args.rows, args.steps, args.step_ms / 1000)
    config = {"rows": args.rows, "steps": args.steps, "step_ms": args.step_ms}
    load = {"load_average": round(os.getloadavg()[0], 1)}
    record("grammar_step", {"config": config, **load, "cases": results}, args.out)


if __name__ == "__main__":
    main()
