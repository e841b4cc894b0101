"""The warm-up compile: later launches find the compiled kernels.

The file is also a script: Triton runs its interpreter in the process of the tests, and the script compiles for a GPU
that need not exist.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine import warmup_compile
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.engine.warmup_compile import MissingKernels, distinct_layers
from mla_router.worker.kernels.attention.absorb import absorb_queries_triton
from mla_router.worker.kernels.rms_norm import rms_norm_triton
from mla_router.worker.kernels.weight import Weight
from support.compiler_process import compiling_environment
from support.sm90 import NoDevice, compile_here
from support.tiny_model import CONFIGS, write_tiny_model


@triton.jit
def _broken(x):
    tl.store(x, there_is_no_such_thing)  # noqa: F821


def launches() -> None:
    """Launches a kernel with plain arguments three times, two of them alike, and one with named tuples of tensors and
    constants."""

    def half(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    for width in (2048, 512, 2048):
        rms_norm_triton(half(2, width), half(width), 1e-6)
    absorb_queries_triton(half(2, 16, 128), Weight(half(16, 128, 512), constant=True))


def fail_in_threads() -> None:
    compiled = warmup_compile._with_launcher

    def alone(compile_fn: Callable[[], Any]) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise SystemError("several at a time")
        return compiled(compile_fn)

    warmup_compile._with_launcher = alone


def compile_in_threads() -> None:
    from triton import knobs
    from triton.runtime import driver

    logging.basicConfig(level="INFO")
    driver.set_active(NoDevice())  # type: ignore[no-untyped-call]
    found: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    with ThreadPoolExecutor(2) as pool:
        missing = MissingKernels(pool)
        for _ in range(2):
            with missing:
                launches()
                _broken[(1,)](torch.empty(1, device="meta"))
        missing.wait()
    compiled = len(found)
    compile_here(launches)
    print(json.dumps([missing.count, found[:compiled], found[compiled:]]))


def test_the_cut_keeps_each_kind_of_layer(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v2_lite"] | {"num_hidden_layers": 5})
    engine = load_engine(WorkerConfig(model_path=str(tmp_path), max_total_tokens=64, device="cpu"))
    layers = engine.model.model.layers
    with distinct_layers(engine.model.model):
        assert list(engine.model.model.layers) == list(layers[:3])  # a dense one, then mixtures
    assert engine.model.model.layers is layers
    assert len(layers) == 5


@pytest.mark.parametrize("threads", ["compile", pytest.param("fail", marks=pytest.mark.slow)])
def test_launches_find_the_compiled_kernels(tmp_path: Path, threads: str) -> None:
    """Kernels are compiled in threads, or afterwards in the main thread if the threads fail."""
    environment = compiling_environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, __file__, threads],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    noted, first, again = json.loads(done.stdout.splitlines()[-1])
    assert noted == 4
    assert first == [False] * 3, done.stderr
    # A kernel that cannot be compiled is left to its launch
    assert done.stderr.count("left to its first launch") == 1, done.stderr
    assert "there_is_no_such_thing" in done.stderr
    assert again == []  # Triton has loaded them and does not compile again


if __name__ == "__main__":
    if sys.argv[1] == "fail":
        fail_in_threads()
    compile_in_threads()
