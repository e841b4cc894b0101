"""A starting engine compiles all its kernels in the warm-up compile. The file is also a script: only a new process
has no kernels loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.engine.warmup_compile import MissingKernels
from support.compiler_process import compiling_environment
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.gpu

WIDTHS = {"v2_lite": {"qk_rope_head_dim": 16}, "llama_gqa": {"head_dim": 64}}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("captured", [True, False])
def test_all_are_compiled_together(name: str, captured: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", **CONFIGS[name] | WIDTHS[name])
    environment = compiling_environment() | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    flags = [] if captured else ["--disable-cuda-graph"]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "model"), *flags],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    together, alone, launchers = json.loads(done.stdout.splitlines()[-1])
    assert len(together) > 10
    assert alone == []
    assert launchers == 0


def get_ready(folder: str, *flags: str) -> None:
    """Prints the names of the kernels compiled in the warm-up, the names of those compiled later, and the number of
    launchers compiled later."""
    together: list[str] = []
    alone: list[str] = []
    launchers = 0
    compiled = together

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    wait, build = MissingKernels.wait, triton.runtime.build._build

    def wait_and_switch(self: MissingKernels) -> None:
        nonlocal compiled
        wait(self)
        compiled = alone

    def count_and_build(*args: Any, **kwargs: Any) -> Any:
        nonlocal launchers
        launchers += compiled is alone
        return build(*args, **kwargs)

    MissingKernels.wait = wait_and_switch  # type: ignore[method-assign]
    triton.runtime.build._build = count_and_build
    knobs.compilation.listener = listen
    load_engine(
        WorkerConfig(
            model_path=folder,
            dtype="bfloat16",
            device="cuda",
            max_total_tokens=4096,
            context_length=160,
            max_running_requests=8,
            cuda_graph_bs="1,2,4,8",
            piecewise_cuda_graph_max_tokens=32,
            disable_cuda_graph="--disable-cuda-graph" in flags,
        )
    )
    torch.cuda.synchronize()
    print(json.dumps([together, alone, launchers]))


if __name__ == "__main__":
    get_ready(*sys.argv[1:])
