"""An engine for an H200 on a machine without a GPU: it launches the kernels, and Triton reports them without running them.

Its tensors are torch's `meta` tensors, which have shapes but no memory, and claim to be on a GPU. Their addresses
count as offsets within a tensor only. Use it in processes without Triton's interpreter, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver

from mla_router.worker.engine.engine import Engine
from mla_router.worker.kernels import device, quantized_linear
from mla_router.worker.kernels.beside import Fork
from mla_router.worker.kernels.moe import experts, quantized_experts
from mla_router.worker.kernels.weight import Activations
from mla_router.worker.model import moe
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.loader import after_load, allocate, default_dtype
from mla_router.worker.model.quantization.apply import quantize
from mla_router.worker.model.registry import build_model
from mla_router.worker.step.engine import Capacity
from support.attention import triton_attention
from support.sm90 import NoDevice

META = torch.device("meta")
H200 = "NVIDIA H200"


class Launches(triton.AsyncCompileMode):  # type: ignore[misc]
    """Collects the kernels that are launched inside, by all properties that distinguish kernels."""

    def __init__(self) -> None:
        super().__init__(None)
        self.kernels: dict[str, Any] = {}

    def submit(self, key: str, compile_fn: Callable[[], Any], _: Callable[[Any], None]) -> None:
        found = dict(
            zip(compile_fn.__code__.co_freevars, compile_fn.__closure__ or (), strict=True)
        )
        self.kernels.setdefault(key, found["src"].cell_contents)


class OneStream(Fork):
    """Runs the work in its place: a pretended GPU has no streams."""

    def __init__(self, x: Activations) -> None:
        self._x, self._event = x, None


def pretend() -> None:
    """Patches torch and Triton in this process."""
    driver.set_active(NoDevice())  # type: ignore[no-untyped-call]
    torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment, method-assign]
    torch.cuda.get_device_name = lambda _=None: H200
    device.NO_GPU = device.H200
    moe.Fork = OneStream  # type: ignore[misc]
    for module in (experts, quantized_experts, quantized_linear):
        module.device_name = lambda _: H200.replace(" ", "_")  # type: ignore[attr-defined]


def meta_engines(
    folder: Path, layers: int, capacity: Capacity, kv_cache_dtype: torch.dtype | None = None
) -> Iterator[Engine]:
    """Yields engines of a model with the shapes of `folder` and `layers` layers."""
    config = replace(read_config(folder), num_layers=layers)
    with META, default_dtype(torch.bfloat16):
        model = build_model(config)
        if config.quantization is not None:
            quantize(model, config.quantization)
        allocate(model)
    after_load(model, torch.bfloat16)
    model.eval()
    while True:
        yield Engine(
            model,
            capacity,
            device=META,
            dtype=torch.bfloat16,
            attention=triton_attention(config, META, kv_cache_dtype or torch.bfloat16),
            kv_cache_dtype=kv_cache_dtype,
        )
