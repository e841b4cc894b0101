"""Steps with speculative decoding, at a set rate of acceptance, and prompts with the drafter.

    python bench/serving/speculation.py --model-path DIR --load-format dummy --drafts 0 1 3 --acceptance 0 0.6 0.8

DIR is a model with a layer for multi-token prediction, or that of `--speculative-algorithm EAGLE`. At a very high
temperature a token is the noise of its position, which the drafter draws as well: every draft is right, whatever the weights
are. Then each draft is made wrong with a probability of 1 - acceptance, and the engine does all the work of real drafting
and verification. All flags of a worker are accepted. The time of a token is that of a step over the tokens that it gives to a
request; that of a step is the median. `--undrafted` is a share of requests that take no drafts: such a request gets one token a
step.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from all_ranks import Loader, on_all_ranks
from mla_router.worker import flags
from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.speculation.drafter import Drafter, DraftStep
from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan

logger = logging.getLogger(__name__)

WARM_UP = 6  # steps that are not counted
NOISE_ALONE = 1e6  # a temperature
Row = dict[str, Any]


def parse_args() -> tuple[argparse.Namespace, WorkerConfig]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--undrafted", type=float, nargs="+", default=[0.0])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths, in tokens")
    parser.add_argument("--out", type=Path)
    flags.add_flags(parser)
    args = parser.parse_args()
    return args, flags.from_namespace(args)


class WrongDrafts:
    """A drafter whose drafts are made wrong with a probability. Implements `Drafter`."""

    def __init__(self, engine: Engine, steps: int) -> None:
        assert engine.drafter is not None
        self._inner: Drafter = engine.drafter
        self._drafts = engine.slots.drafts
        self._last = engine.model.config.vocab_size - 1
        same = torch.Generator(engine.device).manual_seed(0)  # on all ranks
        self._chance = torch.rand(steps, *self._drafts.shape, device=engine.device, generator=same)
        self._wrong = self._chance.long()
        self._step = 0
        self.follows_all_steps = self._inner.follows_all_steps
        self.admit, self.capture = self._inner.admit, self._inner.capture
        self.launch = self._inner.launch

    def set_acceptance(self, acceptance: float) -> None:
        self._wrong = (self._chance >= acceptance).long()
        self._step = 0

    def draft(self, step: DraftStep) -> None:
        self._inner.draft(step)
        self._drafts.add_(self._wrong[self._step % len(self._wrong)]).clamp_max_(self._last)
        self._step += 1


def decode_plans(
    engine: Engine, size: int, undrafted: int, args: argparse.Namespace
) -> Iterator[StepPlan]:
    """Yields the plans of decode steps of `size` requests. The last `undrafted` ones take no drafts. Raises SystemExit if they
    do not fit the KV cache."""
    capacity, drafts = engine.capacity, engine.capacity.num_drafts
    steps = args.steps + WARM_UP
    total = args.input_len + (steps + 2) * (1 + drafts)
    pages = -(-total // capacity.page_size)
    if size * pages > capacity.num_pages:
        raise SystemExit(f"batch size {size} of {total} tokens each does not fit: {capacity}")
    slots, draw, drafted = tuple(range(size)), random.Random(0), size - undrafted
    sampling = [
        SamplingParams(total, temperature=NOISE_ALONE, seed=draw.randrange(1 << 30)) for _ in slots
    ]
    engine.slots.lengths.fill_(args.input_len + 1)
    most = total - 1 - drafts
    plan = StepPlan(
        slots,
        (),
        (),
        (),
        (),
        num_drafts=drafts,
        tree_nodes=capacity.tree_nodes,
        feeds_drafter=drafts > 0,
        draft_bounds=(most + drafts,) * drafted + (0,) * undrafted if drafts else (),
    )
    for step in range(steps):
        # Requests without drafts have exact bounds
        bounds = (most,) * drafted + (args.input_len + 1 + step,) * undrafted
        if step:
            yield replace(plan, decode_bounds=bounds)
        else:
            yield replace(
                plan,
                decode_bounds=bounds,
                page_writes=tuple((s, i, 1 + s * pages + i) for s in slots for i in range(pages)),
                admitted=tuple(Admitted(slot, sampling[slot], (0,)) for slot in slots),
            )


def measure_decode(
    engine: Engine, size: int, undrafted: int, args: argparse.Namespace
) -> dict[str, float]:
    """Returns milliseconds of a step and of a token, and the tokens that a step gives to a request that takes drafts."""
    drafted = size - undrafted
    pending, given, times = None, 0, list[float]()
    last = time.perf_counter()
    for step, plan in enumerate(decode_plans(engine, size, undrafted, args)):
        launched = engine.forward(plan)
        if pending is not None:
            tokens = pending.wait().tokens
            now = time.perf_counter()
            if step > WARM_UP:
                given += sum(map(len, tokens[:drafted]))
                assert all(len(row) == 1 for row in tokens[drafted:]), tokens
                times.append(now - last)
            last = now
        pending = engine.sample(launched)
    assert pending is not None
    pending.wait()
    step_ms = 1e3 * statistics.median(times)
    length = given / (drafted * len(times))
    return {"step_ms": step_ms, "tokens": length, "tpot_ms": step_ms / length}


def measure_prompt(engine: Engine, length: int, repeats: int = 8) -> float:
    """Returns milliseconds from the launch of a step of one prompt to its token, and to its drafts if there is a drafter:
    the median of `repeats`."""
    capacity = engine.capacity
    pages = -(-(length + capacity.tokens_per_row) // capacity.page_size)
    draw, drafts = random.Random(1), capacity.num_drafts
    tokens = tuple(draw.randrange(engine.model.config.vocab_size) for _ in range(length))
    plan = StepPlan(
        (),
        (),
        (PrefillChunk(0, 0, tokens, is_last=True),),
        tuple((0, index, 1 + index) for index in range(pages)),
        (Admitted(0, SamplingParams(9), tokens),),
        feeds_drafter=drafts > 0,
        draft_bounds=(length + drafts,) if drafts else (),
    )
    times = list[float]()
    for _ in range(repeats):
        begin = time.perf_counter()
        pending = engine.sample(engine.forward(plan))
        pending.wait()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[2:])


def measure(engine: Engine, args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Returns the rows of decode steps and those of prompts."""
    drafts = engine.capacity.num_drafts
    prompts = [
        {"drafts": drafts, "tokens": length, "ms": measure_prompt(engine, length)}
        for length in args.prompts
    ]
    wrong = None
    if drafts:
        wrong = WrongDrafts(engine, args.steps + WARM_UP)
        engine.drafter = wrong
    rows = list[Row]()
    for acceptance in args.acceptance if wrong else [0.0]:
        for share in args.undrafted if wrong else [0.0]:
            for size in args.batch_size:
                undrafted = round(share * size)
                if share and not 0 < undrafted < size:
                    continue
                if wrong is not None:
                    wrong.set_acceptance(acceptance)
                found = measure_decode(engine, size, undrafted, args)
                row = {"batch_size": size, "drafts": drafts, "acceptance": acceptance}
                rows.append(row | ({"undrafted": undrafted} if share else {}) | found)
                logger.info("%s", rows[-1])
    return rows, prompts


def compare(rows: list[Row], prompts: list[Row]) -> None:
    """Adds the ratios of times without drafts to those with them, and rounds all numbers."""
    decode = {row["batch_size"]: row["tpot_ms"] for row in rows if not row["drafts"]}
    prompt = {row["tokens"]: row["ms"] for row in prompts if not row["drafts"]}
    for row in rows:
        if before := decode.get(row["batch_size"]):
            row["speed_up"] = before / row["tpot_ms"]
            if row.get("undrafted"):
                row["undrafted_speed_up"] = before / row["step_ms"]
    for row in prompts:
        if before := prompt.get(row["tokens"]):
            row["ratio"] = row["ms"] / before
    for row in rows + prompts:
        row.update({n: round(v, 3) for n, v in row.items() if isinstance(v, float)})


def without_drafts(config: WorkerConfig) -> WorkerConfig:
    """Returns the settings without those of speculative decoding."""
    own = (spec for spec in fields(config) if spec.name.startswith("speculative_"))
    return replace(config, **{spec.name: spec.default for spec in own})


def measure_all(
    load: Loader, args: argparse.Namespace, config: WorkerConfig
) -> tuple[list[Row], list[Row]]:
    """Returns the rows of `measure` for each number of drafts."""
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    rows, prompts = list[Row](), list[Row]()
    for drafts in sorted(args.drafts):
        if drafts:
            kind = config.speculative_algorithm
            settings = replace(
                config,
                speculative_algorithm="NEXTN" if kind == "none" else kind,
                speculative_num_steps=drafts,
            )
        else:
            settings = without_drafts(config)
        engine = load(settings)
        of_decode, of_prompts = measure(engine, args)
        rows += of_decode
        prompts += of_prompts
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return rows, prompts


def main() -> None:
    args, config = parse_args()
    rows, prompts = on_all_ranks(measure_all, config, args, config)
    compare(rows, prompts)
    for row in rows + prompts:
        print("  ".join(f"{name} {value:g}" for name, value in row.items()))
    sizes = {"input_len": args.input_len, "steps": args.steps}
    result = {"config": sizes | config.settings(), "rows": rows}
    record("speculation", result | ({"prompts": prompts} if prompts else {}), args.out)


if __name__ == "__main__":
    main()
