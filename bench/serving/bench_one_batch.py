"""Runs one batch on the engine, without server and scheduler: prefill, then decode steps.

    python bench/serving/bench_one_batch.py --model-path DIR --batch-size 1 8 32 --input-len 1024

Options and report are SGLang's. All flags of a worker are accepted; a folder of `bench/shapes` with `--load-format
dummy` needs no weights. As in the scheduler's loop, the next step is launched before the tokens of the last one are
read. The floor of a decode step is the time to read the weights that the batch needs and its KV cache once. With `--tp-size` the
figures and the floor are those of rank 0, with `--attn-dp-size` (`--dp-size` of DP attention) those of the first DP rank, and each
DP rank has a batch of its own of the same size.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from all_ranks import Loader, on_all_ranks
from mla_router.worker import flags
from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.kernels import pdl
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from mla_router.worker.step.result import StepResult

SEED = 0


def parse_args() -> tuple[argparse.Namespace, WorkerConfig]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1], help="0: as many as fit, up to 512"
    )
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--no-prefill",
        action="store_true",
        help="decode only, over a cache that nobody has written",
    )
    parser.add_argument("--profile", type=Path, help="folder for traces of each batch size")
    parser.add_argument("--no-pdl", action="store_true", help="each kernel starts after the last")
    parser.add_argument("--out", type=Path)
    flags.add_flags(parser)
    args = parser.parse_args()
    return args, flags.from_namespace(args)


def as_many_as_fit(engine: Engine, args: argparse.Namespace) -> int:
    """Up to 512, in whole eights."""
    capacity = engine.capacity
    pages_each = -(-(args.input_len + args.output_len) // capacity.page_size) * capacity.page_kinds
    return min(512, capacity.num_slots, capacity.num_pages // pages_each) // 8 * 8


class Batch:
    """A batch of `size` requests of random tokens, with their pages."""

    def __init__(self, engine: Engine, size: int, args: argparse.Namespace) -> None:
        self.engine, self.size = engine, size
        self.seed = SEED + engine.model.groups.exchange.rank  # of the DP rank
        capacity, draw = engine.capacity, random.Random(self.seed)
        self.length = args.input_len
        total = args.input_len + args.output_len
        # With a window page for each page, as if the prompt were computed in one chunk
        self.pages_each = -(-total // capacity.page_size)
        self.kinds, self.window_column = capacity.page_kinds, capacity.pages_per_request
        needed = size * self.pages_each * self.kinds
        if size > capacity.num_slots or needed > capacity.num_pages:
            raise SystemExit(f"batch size {size} of {total} tokens each does not fit: {capacity}")
        vocabulary = engine.model.config.vocab_size
        self.prompts = [
            tuple(draw.randrange(vocabulary) for _ in range(args.input_len)) for _ in range(size)
        ]
        self.sampling = SamplingParams(args.output_len, temperature=args.temperature)

    def prefill_plans(self, budget: int) -> Iterator[StepPlan]:
        """Yields the prefill steps, with at most `budget` tokens each."""
        slot, start = 0, 0
        while slot < self.size:
            chunks, admitted, room = [], [], budget
            while slot < self.size and room:
                end = min(start + room, self.length)
                chunks.append(
                    PrefillChunk(
                        slot, start, self.prompts[slot][start:end], is_last=end == self.length
                    )
                )
                if start == 0:
                    admitted.append(Admitted(slot, self.sampling, self.prompts[slot]))
                room -= end - start
                slot, start = (slot + 1, 0) if end == self.length else (slot, end)
            writes = self.page_writes(request.slot for request in admitted)
            yield StepPlan((), (), tuple(chunks), writes, tuple(admitted))

    def page_writes(self, slots: Iterable[int]) -> tuple[tuple[int, int, int], ...]:
        each = self.pages_each
        return tuple(
            (slot, kind * self.window_column + index, 1 + (slot * self.kinds + kind) * each + index)
            for slot in slots
            for kind in range(self.kinds)
            for index in range(each)
        )

    def begin_without_prefill(self) -> StepPlan:
        """A decode step that takes the slots. Tokens are random, for experts to be chosen as ever."""
        slots = range(self.size)
        same = torch.Generator(self.engine.device).manual_seed(self.seed)  # on all of its ranks
        self.engine.slots.last_token.random_(self.engine.model.config.vocab_size, generator=same)
        self.engine.slots.lengths.fill_(self.length + 1)
        admitted = tuple(Admitted(slot, self.sampling, self.prompts[slot][:1]) for slot in slots)
        return replace(self.decode_plan(0), page_writes=self.page_writes(slots), admitted=admitted)

    def decode_plans(self, count: int) -> Iterator[StepPlan]:
        """Yields `count` decode steps behind the prompts, however many steps there were: rows whose slot is behind the bound
        of its plan would be idle."""
        self.engine.slots.lengths.fill_(self.length + 1)
        yield from map(self.decode_plan, range(count))

    def decode_plan(self, step: int) -> StepPlan:
        lengths = (self.length + 1 + step,) * self.size
        return StepPlan(tuple(range(self.size)), lengths, (), (), ())


def step_times(engine: Engine, plans: Iterator[StepPlan]) -> tuple[list[float], list[StepResult]]:
    """Returns the seconds between the results of consecutive plans, with one plan launched ahead."""
    pending, times, results = None, [], []
    last = time.perf_counter()
    for plan in plans:
        launched = engine.forward(plan)
        if pending is not None:
            results.append(pending.wait())
            now = time.perf_counter()
            times.append(now - last)
            last = now
        pending = engine.sample(launched)
    assert pending is not None
    results.append(pending.wait())
    times.append(time.perf_counter() - last)
    return times, results


def floor_ms(
    engine: Engine, size: int, length: int, bytes_per_second: float, routed: int | None = None
) -> float:
    """Of a decode step: weights, each expert if any of the batch's tokens is likely to take it, and KV
    cache, read once. `routed`: the tokens of all DP ranks, which the experts take."""
    config, model = engine.model.config, engine.model
    experts, taken = getattr(config, "num_experts", 0), getattr(config, "experts_per_token", 0)
    hit = 1 - (1 - taken / experts) ** (routed or size) if experts else 0.0
    weights = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name and not config.tie_word_embeddings:
            continue
        weights += parameter.nbytes * (hit if ".experts." in name else 1)
    specs = engine.kv_cache.specs
    cache = size * sum(spec.bytes_per_token * min(length, spec.window or length) for spec in specs)
    return 1e3 * (weights + cache) / bytes_per_second


def read_speed(device: torch.device) -> float:
    """Measures the memory bandwidth in bytes per second, by a sum over more data than any cache holds."""
    data = torch.ones(1 << (30 if device.type == "cuda" else 26), device=device)
    out = torch.empty((), device=device)
    times = []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.sum(data, dim=0, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


def run(engine: Engine, size: int, args: argparse.Namespace, speed: float) -> dict[str, Any]:
    batch, budget = Batch(engine, size, args), args.max_prefill_tokens
    prefill = math.nan
    if args.no_prefill:
        step_times(engine, iter([batch.begin_without_prefill()]))
    else:
        step_times(engine, batch.prefill_plans(budget))  # compiles the kernels
        prefill = min(sum(step_times(engine, batch.prefill_plans(budget))[0]) for _ in range(3))
        speed_of_it = size * args.input_len / prefill
        print(f"Prefill. latency: {prefill:.5f} s, throughput: {speed_of_it:9.2f} token/s")
    step_times(engine, batch.decode_plans(args.output_len - 1))
    times, results = step_times(engine, batch.decode_plans(args.output_len - 1))
    median = statistics.median(times[1:])
    print(
        f"Decode.  median latency: {median:.5f} s, median throughput: {size / median:9.2f} token/s"
    )
    if not args.no_prefill:
        total = prefill + sum(times)
        tokens = size * (args.input_len + args.output_len)
        print(f"Total. latency: {total:6.3f} s, throughput: {tokens / total:9.2f} token/s")
    if args.profile:
        trace(engine, batch.decode_plans(4), args.profile / f"decode_{size}.json")
        if not args.no_prefill:
            prompts = itertools.islice(batch.prefill_plans(budget), 4)
            trace(engine, prompts, args.profile / f"prefill_{size}.json")
    routed = size * engine.model.groups.exchange.size
    floor = floor_ms(engine, size, args.input_len + args.output_len // 2, speed, routed)
    distinct = len({token for result in results for (token,) in result.tokens})
    return {
        "batch_size": size,
        "prefill_ms": None if args.no_prefill else round(1e3 * prefill, 2),
        "prefill_tokens_per_s": None if args.no_prefill else round(size * args.input_len / prefill),
        "tpot_ms": round(1e3 * median, 3),
        "decode_tokens_per_s": round(size / median),
        "floor_ms": round(floor, 3),
        "of_floor": round(floor / (1e3 * median), 3),
        "distinct_tokens": distinct,
    }


def trace(engine: Engine, plans: Iterator[StepPlan], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if engine.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step_times(engine, plans)
    profile.export_chrome_trace(str(file))
    sort = "self_cuda_time_total" if engine.device.type == "cuda" else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=sort, row_limit=30, max_name_column_width=70))


def measure(load: Loader, args: argparse.Namespace, config: WorkerConfig) -> dict[str, Any]:
    """Returns the figures of a rank."""
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    pdl.ENABLED = not args.no_pdl
    if load.rank and args.profile:
        args.profile = args.profile / f"rank_{load.rank}"
    begin = time.perf_counter()
    engine = load(config)
    ready = time.perf_counter() - begin
    speed = read_speed(engine.device)
    rows = []
    for size in args.batch_size:
        size = size or as_many_as_fit(engine, args)
        print(f"Batch size {size}, {args.input_len} in, {args.output_len} out")
        rows.append(run(engine, size, args, speed))
    return {"ready_s": round(ready, 1), "read_gb_per_s": round(speed / 1e9), "rows": rows}


def main() -> None:
    args, config = parse_args()
    result = on_all_ranks(measure, config, args, config)
    print("batch  prefill tok/s    TTFT ms    TPOT ms  floor ms  of floor     tok/s")
    for row in result["rows"]:
        print(
            f"{row['batch_size']:5d} {row['prefill_tokens_per_s'] or 0:14,d} {row['prefill_ms'] or 0:10.2f} "
            f"{row['tpot_ms']:10.3f} {row['floor_ms']:9.3f} {row['of_floor']:9.1%} "
            f"{row['decode_tokens_per_s']:9,d}"
        )
    sizes = {"input_len": args.input_len, "output_len": args.output_len}
    record("bench_one_batch", {"config": sizes | config.settings()} | result, args.out)


if __name__ == "__main__":
    main()
