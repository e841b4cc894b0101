"""Compares whole steps under variants of the code, such as other tilings, in one process.

    python bench/serving/step_variants.py variants.py --batch-size 32 128 --prompt-len 1024 --model-path DIR

Each function of `variants.py` is a variant. It gets `patch(module, name, value)`, which is undone after it:

    import mla_router.worker.engine.attention.triton as backend
    from mla_router.worker.kernels.attention.decode_tiling import Tiling

    def narrow(patch):
        patch(backend, "tiling", lambda heads, requests, queries=1, on=None: Tiling(16, 32, 4, 3, 2, pieces=8))

The fastest kernel by itself may not be the fastest within a step. An engine is loaded once. For each variant, in
turns, the CUDA graphs of one size are captured again and replayed, one or two seconds each. The input tokens of the
decode rows are fixed: otherwise a variant with other rounding would draw other tokens, which use other experts.
"""

from __future__ import annotations

import argparse
import copy
import logging
import runpy
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from bench_one_batch import SEED, Batch, step_times
from mla_router.worker import flags
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.engine.runners.sizes import GraphSizes

Patch = Callable[[ModuleType, str, Any], None]
Variant = Callable[[Patch], None]


def as_it_is(patch: Patch) -> None:
    """The baseline."""


def read_variants(file: Path) -> list[Variant]:
    names = runpy.run_path(str(file))
    own = [
        value
        for name, value in names.items()
        if getattr(value, "__module__", "") == names["__name__"] and not name.startswith("_")
    ]
    return [as_it_is, *own]


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    before: list[tuple[ModuleType, str, Any]] = []

    def patch(module: ModuleType, name: str, value: Any) -> None:
        before.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    try:
        variant(patch)
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)


@contextmanager
def given_tokens(engine: Engine) -> Iterator[None]:
    """Draws the next token of every slot once. Sampled tokens do not replace it."""
    slots = engine.slots
    generator = torch.Generator(engine.device).manual_seed(SEED)
    slots.last_token.random_(engine.model.config.vocab_size, generator=generator)
    # The forward pass reads `slots`, and the sampling writes the copy
    engine.slots = copy.copy(slots)
    engine.slots.last_token = slots.last_token.clone()
    try:
        yield
    finally:
        engine.slots = slots


def capture_graphs(engine: Engine, sizes: GraphSizes) -> None:
    if engine.device.type == "cuda":
        engine.capture_graphs(sizes)


class Comparison:
    """Runs all variants in turns, so that all have the same device temperature."""

    def __init__(self, engine: Engine, variants: list[Variant], args: argparse.Namespace) -> None:
        self.engine, self.variants, self.args = engine, variants, args

    def decode_steps(self, size: int) -> dict[str, Any]:
        engine, args = self.engine, self.args
        batch = Batch(engine, size, args)
        capture_graphs(engine, GraphSizes())
        step_times(engine, batch.prefill_plans(args.max_prefill_tokens))

        def once() -> list[float]:
            return step_times(engine, batch.decode_plans(args.output_len - 1))[0][1:]

        def measure() -> list[float]:
            once()
            return [time for _ in range(3) for time in once()]

        with given_tokens(engine):
            return self._run(f"decode step, batch {size}", GraphSizes(decode=[size]), measure)

    def prompts(self, length: int) -> dict[str, Any]:
        """Runs one step at a time, from plan to token."""
        lengths = argparse.Namespace(**vars(self.args) | {"input_len": length})
        plans = list(Batch(self.engine, 1, lengths).prefill_plans(self.args.max_prefill_tokens))

        def measure() -> list[float]:
            times = [sum(step_times(self.engine, iter(plans))[0]) for _ in range(24)]
            return times[4:]

        on_host = self.engine.attention.plans_prefill_on_host
        sizes = GraphSizes(piecewise=[length], prefill=() if on_host else [length])
        return self._run(f"prompt of {length} alone", sizes, measure)

    def _run(
        self, what: str, sizes: GraphSizes, measure: Callable[[], list[float]]
    ) -> dict[str, Any]:
        medians: dict[str, list[float]] = {variant.__name__: [] for variant in self.variants}
        for _ in range(self.args.rounds):
            for variant in self.variants:
                with applied(variant):
                    capture_graphs(self.engine, sizes)
                    medians[variant.__name__].append(1e3 * statistics.median(measure()))
        base = statistics.median(medians[as_it_is.__name__])
        print(f"{what}, ms:")
        for name, found in sorted(medians.items(), key=lambda item: statistics.median(item[1])):
            median = statistics.median(found)
            each = " ".join(f"{one:.4f}" for one in found)
            print(
                f"  {median:9.4f} {100 * (median / base - 1):+7.2f}%  {name} ({each})", flush=True
            )
        rounded = {name: [round(one, 4) for one in found] for name, found in medians.items()}
        return {"what": what, "ms": rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variants", type=Path, help="Python file, each function a variant")
    parser.add_argument("--batch-size", type=int, nargs="*", default=[])
    parser.add_argument("--prompt-len", type=int, nargs="*", default=[], help="prompts alone")
    parser.add_argument("--input-len", type=int, default=1024, help="of the batches' requests")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(temperature=0.0)
    flags.add_flags(parser)
    args = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    variants = read_variants(args.variants)
    engine = load_engine(flags.from_namespace(args))
    comparison = Comparison(engine, variants, args)
    rows = [comparison.decode_steps(size) for size in args.batch_size]
    rows += [comparison.prompts(length) for length in args.prompt_len]
    config = {"variants": args.variants.read_text(), "rounds": args.rounds}
    record("step_variants", {"config": config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
