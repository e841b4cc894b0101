"""Decode steps with speculative decoding, at a set rate of acceptance.

    python bench/serving/speculation.py --model-path DIR --load-format dummy --drafts 0 1 3 --acceptance 0.6 0.8

DIR is a model with a layer for multi-token prediction. At a very high temperature a token is the noise of its position,
which the drafter draws as well: every draft is right, whatever the weights are. Then each draft is made wrong with a
probability of 1 - acceptance, and the engine does all the work of real drafting and verification. All flags of a worker are
accepted. The time of a token is that of a step over the tokens that it gives to a request.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from mla_router.worker import flags
from mla_router.worker.config import WorkerConfig
from mla_router.worker.core import Admitted, SamplingParams, StepPlan
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.engine.speculation.drafter import Drafter, DraftStep

WARM_UP = 6  # steps that are not counted
NOISE_ALONE = 1e6  # a temperature


def parse_args() -> tuple[argparse.Namespace, WorkerConfig]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    flags.add_flags(parser)
    args = parser.parse_args()
    return args, flags.from_namespace(args)


class WrongDrafts:
    """A drafter whose drafts are made wrong with a probability."""

    def __init__(self, engine: Engine, steps: int) -> None:
        assert engine.drafter is not None
        self._inner: Drafter = engine.drafter
        self._drafts = engine.slots.drafts
        self._last = engine.model.config.vocab_size - 1
        self._chance = torch.rand(steps, *self._drafts.shape, device=engine.device)
        self._wrong = self._chance.long()
        self._step = 0

    def set_acceptance(self, acceptance: float) -> None:
        self._wrong = (self._chance >= acceptance).long()
        self._step = 0

    def draft(self, step: DraftStep) -> None:
        self._inner.draft(step)
        self._drafts.add_(self._wrong[self._step % len(self._wrong)]).clamp_max_(self._last)
        self._step += 1


def measure(engine: Engine, size: int, args: argparse.Namespace) -> dict[str, float]:
    """Returns milliseconds of a step and of a token, and the tokens that a step gives to a request."""
    capacity, drafts = engine.capacity, engine.capacity.num_drafts
    each = 1 + drafts
    total = args.input_len + (args.steps + WARM_UP + 2) * each
    pages = -(-total // capacity.page_size)
    if size * pages > capacity.num_pages:
        raise SystemExit(f"batch size {size} of {total} tokens each does not fit: {capacity}")
    slots, draw = tuple(range(size)), random.Random(0)
    sampling = [
        SamplingParams(total, temperature=NOISE_ALONE, seed=draw.randrange(1 << 30)) for _ in slots
    ]
    engine.slots.lengths.fill_(args.input_len + 1)
    writes = tuple(
        (slot, index, 1 + slot * pages + index) for slot in slots for index in range(pages)
    )
    admitted = tuple(Admitted(slot, sampling[slot], (0,)) for slot in slots)
    bound = total - each
    plan = StepPlan(
        slots,
        (bound,) * size,
        (),
        (),
        (),
        num_drafts=drafts,
        makes_drafts=drafts > 0,
        draft_bounds=(bound + drafts,) * size if drafts else (),
    )
    pending, given, times = None, 0, list[float]()
    last = time.perf_counter()
    for step in range(args.steps + WARM_UP):
        first = replace(plan, page_writes=writes, admitted=admitted)
        launched = engine.forward(plan if step else first)
        if pending is not None:
            tokens = pending.wait().tokens
            now = time.perf_counter()
            if step > WARM_UP:
                given += sum(map(len, tokens))
                times.append(now - last)
            last = now
        pending = engine.sample(launched)
    assert pending is not None
    pending.wait()
    step_ms = 1e3 * sum(times) / len(times)
    length = given / (size * len(times))
    return {"step_ms": step_ms, "tokens": length, "tpot_ms": step_ms / length}


def main() -> None:
    args, config = parse_args()
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    rows: list[dict[str, Any]] = []
    without: dict[int, float] = {}
    for drafts in sorted(args.drafts):
        settings: dict[str, Any] = {"speculative_algorithm": "NEXTN"} if drafts else {}
        engine = load_engine(replace(config, **settings, speculative_num_steps=drafts))
        wrong = None
        if drafts:
            wrong = WrongDrafts(engine, args.steps + WARM_UP)
            engine.drafter = wrong  # type: ignore[assignment]
        for acceptance in args.acceptance if drafts else [0.0]:
            for size in args.batch_size:
                if wrong is not None:
                    wrong.set_acceptance(acceptance)
                found = measure(engine, size, args)
                if not drafts:
                    without[size] = found["tpot_ms"]
                row = {"batch_size": size, "drafts": drafts, "acceptance": acceptance} | {
                    name: round(value, 3) for name, value in found.items()
                }
                if size in without:
                    row["speed_up"] = round(without[size] / found["tpot_ms"], 3)
                rows.append(row)
        del engine, wrong
    print("drafts  acceptance  batch  step ms  tokens a step  TPOT ms  speed-up")
    for row in rows:
        print(
            f"{row['drafts']:6d} {row['acceptance']:11.2f} {row['batch_size']:6d} {row['step_ms']:8.3f} "
            f"{row['tokens']:14.2f} {row['tpot_ms']:8.3f} {row.get('speed_up', 0):9.2f}"
        )
    sizes = {"input_len": args.input_len, "steps": args.steps}
    record("speculation", {"config": sizes | config.settings(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
