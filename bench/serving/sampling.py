"""The time of sampling a step's tokens, by the features that the batch uses: on the device and on the host.

    python bench/serving/sampling.py [--device cuda] [--out bench/results/sampling.jsonl]

`device` is the time of one `Sampler.sample` in a sequence of steps; on a CPU it equals the host's time. `host` is the
time of the call, `peak` its memory beyond the logits. The floor is one pass over the logits, at the speed of a copy in
the same run. On a GPU torch's sync debug mode is "error": a call that waits for the device raises.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from mla_router.worker.engine.async_copy import AsyncCopyBuffers
from mla_router.worker.engine.sampling.drafted_rows import SlotTokens
from mla_router.worker.engine.sampling.sampler import Sampler
from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.plan import Admitted, StepPlan, TokenMasks

PROMPT, MAX_TOKENS = range(500), 1 << 20
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "logit_bias": {"logit_bias": tuple((7 * n, 1.0) for n in range(300))},
    "masks": {},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 20},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab-size", type=int, default=129_280)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class Case:
    """A batch in which `asking` rows have the sampling parameters of the case, and the others are greedy."""

    def __init__(self, name: str, batch: int, asking: int, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        wants, other = SamplingParams(MAX_TOKENS, **CASES[name]), SamplingParams(MAX_TOKENS)
        admitted = [Admitted(s, wants if s < asking else other, PROMPT) for s in range(batch)]
        self.sampler = Sampler(batch, args.vocab_size, self.device)
        self.copies = AsyncCopyBuffers(self.device)
        self.sampler.admit(tuple(admitted))
        self.plan = StepPlan(tuple(range(batch)), (len(PROMPT),) * batch, (), (), ())
        self.slots = torch.arange(batch, device=self.device)
        self.lengths = torch.full_like(self.slots, len(PROMPT), dtype=torch.int32)
        self.last_token = torch.zeros_like(self.slots)
        self.masks = None
        if name == "masks":
            words = -(-args.vocab_size // 32)
            bits = np.random.default_rng(1).integers(-(1 << 31), 1 << 31, (asking, words))
            self.masks = TokenMasks(tuple(range(asking)), bits.astype(np.int32))

    @torch.inference_mode()
    def step(self, logits: Tensor) -> Any:
        began = time.perf_counter()
        tokens = self.copies.tokens(len(self.slots), 1)
        sampled = self.sampler.sample(
            logits,
            self.slots,
            self.plan,
            self.masks,
            tokens=SlotTokens(self.lengths, self.last_token, self.last_token[:, None]),
            out=tokens,
        )
        return self.copies.start(self.plan, tokens, sampled.logprobs, None, began=began)


def copy_speed(device: torch.device) -> float:
    """Measures the bytes per second that a copy reads. It fits in no cache, and writes as many bytes."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = measure(lambda: target.copy_(source), device, 0.3)[0]
    return 2 * source.nbytes / seconds


def measure(call: Callable[[], Any], device: torch.device, seconds: float) -> tuple[float, float]:
    """Returns the median seconds of a step and of the call."""
    for _ in range(3):
        call()
    steps, calls = [], []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(steps) < 5:
        if device.type == "cpu":
            began = time.perf_counter()
            call()
            steps.append(time.perf_counter() - began)
            calls.append(steps[-1])
            continue
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the device must not wait for the host
        start.record()
        began = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        call()
        torch.cuda.set_sync_debug_mode("default")
        calls.append(time.perf_counter() - began)
        end.record()
        end.synchronize()
        steps.append(start.elapsed_time(end) / 1e3)
    return statistics.median(steps), statistics.median(calls)


def run(
    name: str, batch: int, asking: int, args: argparse.Namespace, speed: float
) -> dict[str, Any]:
    case = Case(name, batch, asking, args)
    logits = 4 * torch.randn(batch, args.vocab_size, device=case.device)
    peak = 0.0
    if case.device.type == "cuda":
        case.step(logits).wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.step(logits).wait()
        peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    seconds, host = measure(lambda: case.step(logits), case.device, args.seconds)
    return {
        "case": name,
        "batch": batch,
        "asking": asking,
        "device_us": round(1e6 * seconds, 1),
        "host_us": round(1e6 * host, 1),
        "floor_us": round(1e6 * logits.nbytes / speed, 1),
        "peak_mb": round(peak, 1),
    }


def main() -> None:
    args = parse_args()
    speed = copy_speed(torch.device(args.device))
    rows = []
    for batch in args.batches:
        for name in CASES:
            for asking in sorted({1, batch}):
                row = run(name, batch, asking, args, speed)
                if not rows:
                    print("  ".join(f"{key:>12}" for key in row))
                print("  ".join(f"{value:>12}" for value in row.values()), flush=True)
                rows.append(row)
    config = {"device": args.device, "vocab_size": args.vocab_size, "copy_gb_s": round(speed / 1e9)}
    record("sampling", {"config": config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
