"""Kernels are compiled side by side, before the first of them runs.

Triton compiles a kernel when it is first launched, and an engine that gets ready launches some seventy, one after
another: half a minute in which all cores but one are idle. So its steps are *rehearsed* first: launched into CUDA
graphs that nobody replays. Nothing runs then, whatever lies in the memory that it would read, and threads compile what
Triton misses; most of their work holds no lock of Python's. What no rehearsal had is compiled when it comes, as ever.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from tqdm import tqdm
from triton.runtime import driver

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.model.decoder import Decoder

logger = logging.getLogger(__name__)

MAX_THREADS = 16  # a fifth or sixth of a compilation holds the lock: more would wait for each other


def compile_together(engine: Engine, plans: Sequence[StepPlan], sizes: GraphSizes) -> None:
    """Compile the kernels of these plans and of captured graphs of these sizes. `engine` is of no use afterwards."""
    begin, threads = time.perf_counter(), min(len(os.sched_getaffinity(0)), MAX_THREADS)
    # Triton asks for the current device, which each thread has for itself
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:
        missing = MissingKernels(pool)
        rehearse(engine, plans, sizes, missing)
        if missing.count:
            missing.wait()
            logger.info(
                "%d kernels compiled, or found in Triton's cache: %.1f s with %d threads",
                missing.count,
                time.perf_counter() - begin,
                threads,
            )


def octaves(largest: int) -> list[int]:
    """Numbers of rows up to `largest`, four to an octave: kernels are others from some of them on."""
    sizes = [
        quarters << octave for octave in range(largest.bit_length()) for quarters in (4, 5, 6, 7)
    ]
    return [size for size in (1, 2, 3, *sizes) if size <= largest]


def rehearsed_sizes(plans: Sequence[StepPlan], sizes: GraphSizes) -> GraphSizes:
    """Prompts alone up to the longest in `plans`, whatever sizes are captured; and decode rows, beyond the captured
    sizes, up to the most in `plans`."""
    prompts = octaves(max(len(chunk.tokens) for plan in plans for chunk in plan.chunks))
    decode = octaves(max(len(plan.decode_slots) for plan in plans))
    captured = max(sizes.decode, default=0)
    return replace(
        sizes,
        decode=[*sizes.decode, *(size for size in decode if size > captured)],
        prefill=[size for size in prompts if size > 1],
    )


def rehearse(
    engine: Engine, plans: Sequence[StepPlan], sizes: GraphSizes, missing: MissingKernels
) -> None:
    """Begins to compile what is `missing`."""
    # Libraries are set up by their first use, which may not be in a recording
    square = torch.zeros(16, 16, device=engine.device)
    torch.mm(square, square)
    graphs: list[torch.cuda.CUDAGraph] = []  # their memory is for all, and lives as long as they
    pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def nothing_runs() -> Iterator[None]:
        graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
        # Relaxed: memory may be pinned, which another mode forbids because it might wait
        with missing, torch.cuda.graph(graphs[-1], pool, capture_error_mode="relaxed"):
            yield

    gc.disable()  # nothing may be freed on the device in the middle of a recording
    try:
        with few_layers(engine.model.model):
            launch_steps(engine, plans, rehearsed_sizes(plans, sizes), nothing_runs)
    finally:
        gc.enable()


@torch.inference_mode()
def launch_steps(
    engine: Engine,
    plans: Sequence[StepPlan],
    sizes: GraphSizes,
    nothing_runs: Callable[[], AbstractContextManager[None]],
) -> None:
    """Launch the steps of `plans`, and decode and prefill steps of `sizes`, each within `nothing_runs`; nothing, if
    prefill is planned on the host."""
    if engine.attention.plans_prefill_on_host:
        return
    forward, prefills = engine.forward_pass, engine.runners.prefill_graph
    for size in sizes.decode:
        rows = engine.slots.idle_rows(size)
        with nothing_runs():
            forward.decode(engine.slots.look_up(rows))
    for size in sizes.prefill:
        prefill, prompt = prefills.plan_prefill(size), prefills.idle_prompt(size)
        with nothing_runs():
            prefill(prompt)
    for plan in plans:
        with nothing_runs():
            engine.sample(engine.forward(plan))


@contextmanager
def few_layers(decoder: Decoder) -> Iterator[None]:
    """Up to the first layer of the last kind, and the one after it: those like it launch the same, but for the
    very first, which has no residual to add to."""
    seen, needed, layers = set(), 0, decoder.layers
    for count, layer in enumerate(layers, 1):
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        if shapes not in seen:
            seen.add(shapes)
            needed = count + 1
    decoder.layers = layers[:needed]
    try:
        yield
    finally:
        decoder.layers = layers


class _Begun(NamedTuple):
    future: Future[Any]
    compile_fn: Callable[[], Any]
    finalize: Callable[[Any], None]

    def finish(self) -> None:
        """Makes it known to Triton. Rarely, Triton's front end fails in one of several threads at what compiles by
        itself: once more, then, alone."""
        try:
            failed = self.future.exception() is not None
            self.finalize(_with_launcher(self.compile_fn) if failed else self.future.result())
        except Exception:
            logger.info("a kernel is left to its first launch", exc_info=True)


class MissingKernels(triton.AsyncCompileMode):  # type: ignore[misc]
    """While this is entered, Triton hands kernels that it has not loaded to `submit`, and launches nothing
    if it gets none back."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._begun: dict[str, _Begun] = {}

    @property
    def count(self) -> int:
        return len(self._begun)

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> None:
        if key not in self._begun:
            future = self.executor.submit(_with_launcher, compile_fn)
            self._begun[key] = _Begun(future, compile_fn, finalize_fn)

    def wait(self) -> None:
        """Until all are compiled, and known to Triton. What cannot be is left to its first launch, which says why."""
        futures = [begun.future for begun in self._begun.values()]
        for _ in tqdm(as_completed(futures), "Compiling kernels", len(futures), disable=None):
            pass
        for begun in self._begun.values():
            begun.finish()


def _with_launcher(compile_fn: Callable[[], Any]) -> Any:
    kernel = compile_fn()
    # What calls the kernel is C, compiled as well, and found in the cache when it is loaded
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
