"""The warm-up compile: Triton kernels are compiled in parallel, before the first step runs.

Triton compiles a kernel at its first launch. A starting engine launches more than a hundred kernels one after
another, so one core compiles for minutes and the others idle. Therefore the engine's steps are first captured into
CUDA graphs that are never replayed. Nothing runs on the device then, so the content of its memory does not matter.
Each kernel that Triton has not loaded goes to a thread pool: most of a compilation does not hold Python's global
lock. A kernel that is missed here is compiled at its first launch, as usual.
"""

from __future__ import annotations

import gc
import logging
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

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.host_limits import usable_cores
from mla_router.worker.model.decoder import Decoder, DecoderLayer
from mla_router.worker.step.plan import StepPlan

logger = logging.getLogger(__name__)

# A fifth of a compilation holds the global lock, so more threads would wait for each other
MAX_THREADS = 16


def warmup_compile(engine: Engine, plans: Sequence[StepPlan], sizes: GraphSizes) -> None:
    """Compiles the kernels of the steps `plans` and of captured graphs of `sizes`. `engine` must not be used
    afterwards."""
    begin, threads = time.perf_counter(), min(usable_cores(), MAX_THREADS)
    # Triton asks for the current device, which each thread has for itself
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:
        missing = MissingKernels(pool)
        find_missing_kernels(engine, plans, sizes, missing)
        if missing.count:
            logger.info(
                "Compiling %d kernels with %d threads, except those in Triton's cache",
                missing.count,
                threads,
            )
            missing.wait()
            logger.info("Compiled the kernels: %.1f s", time.perf_counter() - begin)


def row_counts(largest: int) -> list[int]:
    """Returns numbers of rows up to `largest`, four between consecutive powers of two: the kernels change at some of
    them."""
    sizes = [
        quarters << octave for octave in range(largest.bit_length()) for quarters in (4, 5, 6, 7)
    ]
    return [size for size in (1, 2, 3, *sizes) if size <= largest]


def warmup_sizes(plans: Sequence[StepPlan], sizes: GraphSizes) -> GraphSizes:
    """Returns the steps to launch beside `plans`: single prompts up to the longest chunk of `plans`, whatever sizes
    are captured; the decode sizes of `sizes`, and larger ones up to the most decode rows of `plans`."""
    prompts = row_counts(max(len(chunk.tokens) for plan in plans for chunk in plan.chunks))
    decode = row_counts(max(plan.num_decode_rows for plan in plans))
    captured = max(sizes.decode, default=0)
    return replace(
        sizes,
        decode=[*sizes.decode, *(size for size in decode if size > captured)],
        prefill=[size for size in prompts if size > 1],
    )


def find_missing_kernels(
    engine: Engine, plans: Sequence[StepPlan], sizes: GraphSizes, missing: MissingKernels
) -> None:
    """Captures the steps once, and submits each kernel that is not loaded to `missing`."""
    # The first use of a library sets it up, which a capture does not permit
    square = torch.zeros(16, 16, device=engine.device)
    torch.mm(square, square)
    graphs: list[torch.cuda.CUDAGraph] = []  # all share one pool, which lives as long as the graphs
    pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture() -> Iterator[None]:
        graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
        # Relaxed: host memory may be pinned inside, which the other modes forbid because it might wait
        with missing, torch.cuda.graph(graphs[-1], pool, capture_error_mode="relaxed"):
            yield

    gc.disable()  # nothing may be freed on the device during a capture
    try:
        with distinct_layers(engine.model.model):
            launch_steps(engine, plans, warmup_sizes(plans, sizes), capture)
    finally:
        gc.enable()


@torch.inference_mode()
def launch_steps(
    engine: Engine,
    plans: Sequence[StepPlan],
    sizes: GraphSizes,
    capture: Callable[[], AbstractContextManager[None]],
) -> None:
    """Launches the steps of `plans`, and decode and prefill steps of `sizes`, each within `capture`. Does nothing if
    the attention backend plans prefill on the host."""
    if engine.attention.plans_prefill_on_host:
        return
    forward, prefills = engine.forward_pass, engine.runners.prefill_graph
    for decode_sizes, queries in (
        (sizes.decode, 1),
        (sizes.verify, engine.capacity.rows_per_decode),
    ):
        for size in decode_sizes:
            rows = engine.slots.idle_rows(size)
            with capture():
                output = forward.decode(rows, queries)
                if engine.drafter is not None:
                    engine.drafter.launch(rows, output.hidden_states, queries)
    for size in sizes.prefill:
        prefill, prompt = prefills.plan_prefill(size), prefills.idle_prompt(size)
        with capture():
            prefill(prompt)
    for plan in plans:
        with capture():
            engine.sample(engine.forward(plan))


@contextmanager
def distinct_layers(decoder: Decoder) -> Iterator[None]:
    """Cuts `decoder` after the first layer of its last kind and one more layer. Layers of one kind, shapes
    and attention, launch the same kernels, except for the first layer of the model, which has no residual to add to."""
    seen, needed, layers = set(), 0, decoder.layers
    for count, layer in enumerate(layers, 1):
        assert isinstance(layer, DecoderLayer), f"a layer that is {type(layer)}"
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        kind = layer.self_attn.attention_index, shapes
        if kind not in seen:
            seen.add(kind)
            needed = count + 1
    decoder.layers = layers[:needed]
    try:
        yield
    finally:
        decoder.layers = layers


class _Compilation(NamedTuple):
    future: Future[Any]
    compile_fn: Callable[[], Any]
    finalize: Callable[[Any], None]

    def finish(self) -> None:
        """Hands the kernel to Triton. Triton's front end rarely fails in one of several threads although the kernel
        compiles alone: this thread then tries once more."""
        try:
            failed = self.future.exception() is not None
            self.finalize(_with_launcher(self.compile_fn) if failed else self.future.result())
        except Exception:
            logger.info("a kernel is left to its first launch", exc_info=True)


class MissingKernels(triton.AsyncCompileMode):  # type: ignore[misc]
    """A context in which Triton calls `submit` for each kernel that it has not loaded, and launches nothing if it gets
    no kernel back."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._compilations: dict[str, _Compilation] = {}

    @property
    def count(self) -> int:
        return len(self._compilations)

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> None:
        if key not in self._compilations:
            future = self.executor.submit(_with_launcher, compile_fn)
            self._compilations[key] = _Compilation(future, compile_fn, finalize_fn)

    def wait(self) -> None:
        """Waits until all kernels are compiled and handed to Triton. A kernel that fails is left to its first launch,
        which raises the error."""
        futures = [compilation.future for compilation in self._compilations.values()]
        for _ in tqdm(as_completed(futures), "Compiling kernels", len(futures), disable=None):
            pass
        for compilation in self._compilations.values():
            compilation.finish()


def _with_launcher(compile_fn: Callable[[], Any]) -> Any:
    kernel = compile_fn()
    # The kernel's launcher is compiled C as well; the compiler cache then has it when the kernel is loaded
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
