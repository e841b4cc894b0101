"""The launches of a layer of V2-Lite's shape on an H200: our kernels, and products of the library; and launches of the
quantizer in whole decode steps with FP8 weights. The file is also a script, since Triton interprets in the tests' process.

A change of `worker/model` that is not about speed must not change these lists.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.compiler_process import compiling_environment
from support.processes import ROOT

# One request: the norm is part of the product that reads it, and shared experts of the routed experts' products
DECODE_1 = [
    "_norm_linear_kernel",  # queries and latents
    "_rope_absorb_kernel",
    "attend_hopper_kernel",
    "merge_kernel",
    "_absorb_kernel",
    "_linear_kernel",  # output
    "_norm_linear_kernel",  # router
    "_route",
    "_gate_up_gemv",
    "_down_gemv",
]
SORTED_EXPERTS = ["_route", "_gate_up_gemm", "_down_gemm", "_combine"]
DECODE_8 = [
    "_rms_norm_kernel",
    "_few_rows_kernel",
    "_rope_absorb_kernel",
    "attend_hopper_kernel",
    "merge_kernel",
    "_absorb_kernel",
    "_few_rows_kernel",
    "_norm_linear_kernel",
    "library",  # shared experts
    "_silu_and_mul_kernel",
    "_few_rows_kernel",
    *SORTED_EXPERTS,
]
DECODE_64 = [
    "_rms_norm_kernel",
    "library",
    "_rope_absorb_kernel",
    "attend_hopper_kernel",
    "merge_kernel",
    "_absorb_kernel",
    "library",
    "_norm_linear_kernel",
    "library",
    "_silu_and_mul_kernel",
    "library",
    "_route",
    "_place",
    "_gate_up_gemm",
    "_down_gemm",
    "_combine",
]
PROMPT_1024 = [
    "_rms_norm_kernel",
    "library",
    "_rope_kv_write_kernel",
    "library",  # keys and values of all heads
    "_ragged_attention",
    "library",
    "_rms_norm_kernel",
    "library",  # router
    "_route",
    "_count",
    "_place",
    "_gate_up_gemm",  # with the shared experts
    "_down_gemm_in_rounds",
    "_combine",
]
EXPECTED = {
    "decode 1": DECODE_1,
    "decode 8": DECODE_8,
    "decode 64": DECODE_64,
    "prompt 1024": PROMPT_1024,
}


FP8_SHAPES = ("deepseek-v2-lite-fp8", "deepseek-v3-4-layers-fp8")
LAYERS = 4
FP8_ROWS = (4, 8, 12, 32, 64, 128)


@pytest.fixture(scope="module")
def launched() -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, __file__],
        env=compiling_environment(),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    lists: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return lists


@pytest.mark.parametrize("case", EXPECTED)
def test_a_layer_launches(case: str, launched: dict[str, list[str]]) -> None:
    assert launched[case] == EXPECTED[case]


@pytest.mark.parametrize("shape", FP8_SHAPES)
@pytest.mark.parametrize("rows", FP8_ROWS)
def test_no_launch_quantizes_rows_of_a_decode_step(
    shape: str, rows: int, launched: dict[str, list[str]]
) -> None:
    """Rows leave the kernels that compute them in the form of the products that take them. An exception are the values of few
    heads, which are faster in more programs than heads."""
    names = launched[f"{shape} {rows}"]
    apart = shape == "deepseek-v2-lite-fp8" and rows > 16
    assert names.count("_quantize_kernel") == (LAYERS if apart else 0)
    quantized = {"_quantized_linear_kernel", "_gate_up"}  # products of quantized rows
    assert quantized & set(names)


def record() -> dict[str, list[str]]:
    """Returns the launches of the second of four layers, a mixture of experts, in each case, and those of whole steps with
    FP8 weights."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.jit import JITFunction

    from mla_router.worker.generation import SamplingParams
    from mla_router.worker.step.engine import Capacity
    from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
    from support.meta_engine import Launches, meta_engines, pretend

    names: list[str] = []
    launch = JITFunction.run
    products = (
        "aten::mm",
        "aten::linear",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm_v2",
    )

    def noted(self, *args, grid, warmup, **kwargs):  # type: ignore[no-untyped-def]
        names.append(self.fn.__name__)
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    class Library(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.name().split(".")[0] in products:
                names.append("library")
            return func(*args, **(kwargs or {}))

    pretend()
    JITFunction.run = noted
    capacity = Capacity(1024, 16, 128, 32768)
    engine = next(meta_engines(ROOT / "bench" / "shapes" / "deepseek-v2-lite", LAYERS, capacity))
    layers = engine.model.model.layers
    begin, found = list[int](), dict[str, list[str]]()
    for layer in (layers[1], layers[2]):
        layer.register_forward_pre_hook(lambda *_: begin.append(len(names)))
    with torch.inference_mode(), Launches(), Library():
        for rows in (1, 8, 64):
            begin.clear()
            engine.forward_pass.decode(engine.slots.idle_rows(rows))
            found[f"decode {rows}"] = names[begin[0] : begin[1]]
        begin.clear()
        chunk = PrefillChunk(0, 0, (0,) * 1024, True)
        admitted = (Admitted(0, SamplingParams(2), (0,)),)
        engine.sample(engine.forward(StepPlan((), (), (chunk,), ((0, 0, 1),), admitted)))
        found["prompt 1024"] = names[begin[0] : begin[1]]
        for shape in FP8_SHAPES:
            engine = next(meta_engines(ROOT / "bench" / "shapes" / shape, LAYERS, capacity))
            for rows in FP8_ROWS:
                names.clear()
                engine.forward_pass.decode(engine.slots.idle_rows(rows))
                found[f"{shape} {rows}"] = [*names]
    return found


if __name__ == "__main__":
    print(json.dumps(record()))
