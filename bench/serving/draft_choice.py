"""Whole answers where the worker chooses by measured times whether steps have drafts, at a set rate of acceptance.

    python bench/serving/draft_choice.py --model-path DIR --load-format dummy --acceptance 0 0.6

The scheduler of a worker serves a batch of equal requests, first without speculative decoding, then with the automatic choice,
with a new choice for each batch. Drafts are made wrong as in `speculation.py`. The speed-up is the ratio of tokens a second,
from the moment when all requests have a token to the end of the first request. It includes the trials of the choice.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from mla_router.worker import flags
from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import Deltas, Generate, Shutdown, ToScheduler, ToServer
from mla_router.worker.scheduler.scheduler import Scheduler
from speculation import NOISE_ALONE, Row, WrongDrafts, without_drafts

PATTERN = 1024  # steps until the wrong drafts are at the same places again


@dataclass
class Requests:
    """The server's end: sends all requests at once, and notes the time of their tokens. Implements `Channel`."""

    messages: list[ToScheduler]
    num_servers: int = 1
    given: Counter[str] = field(default_factory=Counter)
    began: float = 0.0  # time of the last first token
    at_begin: int = 0  # tokens given until then
    ended: float = 0.0  # time of the first end
    at_end: int = 0
    left: int = 0

    def receive(self, timeout_s: float) -> list[ToScheduler]:
        del timeout_s
        messages, self.messages = self.messages, []
        self.left = self.left or len(messages)
        return messages

    def send(self, message: ToServer, server: int | None = None) -> None:
        del server
        if not isinstance(message, Deltas):
            return
        now, total = time.perf_counter(), self.given.total()
        for delta in message.items:
            if delta.finish_reason:
                self.left -= 1
                if not self.ended:
                    self.ended, self.at_end = now, total
                if not self.left:
                    self.messages = [Shutdown()]
            self.given[delta.rid] += len(delta.token_ids)
        if not self.began and len(self.given) == self.left:
            self.began, self.at_begin = now, self.given.total()

    @property
    def tokens_per_second(self) -> float:
        return (self.at_end - self.at_begin) / (self.ended - self.began)


def parse_args() -> tuple[argparse.Namespace, WorkerConfig]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, nargs="+", default=[1500, 1000, 700, 700])
    parser.add_argument("--out", type=Path)
    flags.add_flags(parser)
    args = parser.parse_args()
    if len(args.output_len) != len(args.batch_size):
        parser.error("--output-len: one for each --batch-size")
    return args, flags.from_namespace(args)


def serve(engine: Engine, config: WorkerConfig, size: int, inputs: int, outputs: int) -> Row:
    """Returns the tokens a second of `size` requests, and the decode steps of a request with drafts for each of its tokens."""
    draw, vocab_size = random.Random(size), engine.model.config.vocab_size
    requests = Requests(
        [
            Generate(
                f"r{n}",
                [draw.randrange(vocab_size) for _ in range(inputs)],
                SamplingParams(outputs, temperature=NOISE_ALONE, seed=draw.randrange(1 << 30)),
            )
            for n in range(size)
        ]
    )
    scheduler = Scheduler(engine, requests, config, vocab_size=vocab_size)
    scheduler.overlap_loop()
    return {
        "tokens_per_s": requests.tokens_per_second,
        "steps_with_drafts": scheduler.draft_counts.steps / (size * outputs),
    }


def main() -> None:
    args, config = parse_args()
    logging.basicConfig(level="WARNING")
    kind = config.speculative_algorithm
    plain = without_drafts(config)
    chosen = replace(config, speculative_algorithm="NEXTN" if kind == "none" else kind)
    before: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    for settings in (plain, chosen):
        engine = load_engine(settings)
        wrong = None
        if settings is chosen:
            wrong = WrongDrafts(engine, PATTERN)
            engine.drafter = wrong
        for acceptance in args.acceptance if wrong else [0.0]:
            for size, outputs in zip(args.batch_size, args.output_len, strict=True):
                if wrong is not None:
                    wrong.set_acceptance(acceptance)
                gc.collect()
                found = serve(engine, settings, size, args.input_len, outputs)
                before.setdefault(size, found["tokens_per_s"])
                if wrong is None:
                    found = serve(engine, settings, size, args.input_len, outputs)
                speed_up = found["tokens_per_s"] / before[size]
                row = {"chosen": wrong is not None, "batch_size": size, "output_len": outputs}
                rows.append(row | {"acceptance": acceptance} | found | {"speed_up": speed_up})
                rows[-1].update(
                    {n: round(v, 4) for n, v in rows[-1].items() if isinstance(v, float)}
                )
                print(
                    "  ".join(f"{name} {value:g}" for name, value in rows[-1].items()), flush=True
                )
        del engine, wrong
        gc.collect()
        torch.cuda.empty_cache()
    sizes = {"input_len": args.input_len, "drafts": chosen.num_drafts}
    record("draft_choice", {"config": sizes | config.settings(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
