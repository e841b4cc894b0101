"""The time of the kernels between the matrix products, and the time to move their bytes.

    python bench/kernels/bench_elementwise.py [--tokens 1 128] [--sweep] [--out FILE]

`graph` is one of many consecutive calls in a CUDA graph, as in a captured decode step, with inputs in L2 if they fit;
`cold` is one call with a cold L2. The floor is the time to read the inputs and write the results once. `torch` is the
torch function, launched eagerly with a cold L2. `--sweep` also times each kernel with other numbers of warps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.timing import floor_us, time_graph_us, time_us
from record import record

from mla_router.worker.kernels.kv_cache.rope_kv_write import (
    rope_kv_write_torch,
    rope_kv_write_triton,
)
from mla_router.worker.kernels.rms_norm import (
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_torch,
    rms_norm_triton,
)
from mla_router.worker.kernels.silu_and_mul import silu_and_mul_torch, silu_and_mul_triton

EPS = 1e-6


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    shared_width: int  # of the shared experts together


MODELS = (Model("V2-Lite", 2048, 16, 2816), Model("V3", 7168, 128, 2048))
NOPE, ROPE, LATENT, PAGE = 128, 64, 512, 64  # of both


@dataclass(frozen=True)
class Case:
    op: str
    triton: Callable[..., Any]  # takes num_warps
    torch: Callable[[], Any]
    moved_bytes: int


def cases(model: Model, tokens: int) -> Iterator[Case]:
    x, residual = torch.randn(2, tokens, model.hidden, device="cuda").bfloat16()
    weight = torch.randn(model.hidden, device="cuda").bfloat16()
    yield Case(
        "rms_norm",
        lambda **how: rms_norm_triton(x, weight, EPS, **how),
        lambda: rms_norm_torch(x, weight, EPS),
        2 * x.nbytes + weight.nbytes,
    )
    yield Case(
        "add_rms_norm",
        lambda **how: add_rms_norm_triton(x, residual, weight, EPS, **how),
        lambda: add_rms_norm_torch(x, residual, weight, EPS),
        4 * x.nbytes + weight.nbytes,
    )
    yield rope_kv_write_case(model, tokens)
    gate_up = torch.randn(tokens, 2 * model.shared_width, device="cuda").bfloat16()
    yield Case(
        "silu_and_mul",
        lambda **how: silu_and_mul_triton(gate_up, **how),
        lambda: silu_and_mul_torch(gate_up),
        3 * gate_up.nbytes // 2,
    )


def rope_kv_write_case(model: Model, tokens: int) -> Case:
    width = model.heads * (NOPE + ROPE)
    joined = torch.randn(tokens, width + LATENT + ROPE, device="cuda").bfloat16()
    q, kv = torch.split(joined, [width, LATENT + ROPE], dim=-1)
    inputs = (
        q.view(tokens, model.heads, NOPE + ROPE),
        kv,
        torch.randn(LATENT, device="cuda").bfloat16(),
        EPS,
        torch.polar(*torch.rand(2, tokens, ROPE // 2, device="cuda")),
        torch.empty(tokens // PAGE + 1, PAGE, LATENT + ROPE, device="cuda").bfloat16(),
        torch.randperm(tokens, device="cuda"),
    )
    moved = 2 * 2 * tokens * (model.heads * ROPE + LATENT + ROPE) + tokens * (4 * ROPE + 8)
    return Case(
        "rope_kv_write",
        lambda **how: rope_kv_write_triton(*inputs, interleaved=True, **how),
        lambda: rope_kv_write_torch(*inputs, interleaved=True),
        moved,
    )


def measure(model: Model, tokens: int, case: Case, num_warps: int | None) -> dict[str, Any]:
    how = {} if num_warps is None else {"num_warps": num_warps}

    def call() -> Any:
        return case.triton(**how)

    graph, cold, floor = (
        time_graph_us(call),
        time_us(call),
        floor_us(moved_bytes=case.moved_bytes),
    )
    return {
        "model": model.name,
        "op": case.op,
        "tokens": tokens,
        "warps": num_warps or "chosen",
        "graph_us": round(graph, 2),
        "cold_us": round(cold, 2),
        "torch_us": round(time_us(case.torch), 2) if num_warps is None else "",
        "floor_us": round(floor, 2),
        "gb_s": round(case.moved_bytes / cold / 1e3),
        "percent_of_floor": round(100 * floor / cold),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128, 4096])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    rows = []
    for model in MODELS:
        for tokens in args.tokens:
            for case in cases(model, tokens):
                for num_warps in (None, 1, 2, 4, 8, 16) if args.sweep else (None,):
                    row = measure(model, tokens, case, num_warps)
                    if not rows:
                        print("  ".join(f"{key:>13}" for key in row))
                    print("  ".join(f"{value:>13}" for value in row.values()), flush=True)
                    rows.append(row)
    record("elementwise", {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
