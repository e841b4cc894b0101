"""The fused kernels of a decode step, before a layer's attention and experts, and the same without fusion.

    python bench/kernels/bench_joined.py [--sweep] [--out bench/results/joined.jsonl]

A repetition is this part of one layer in a CUDA graph of all layers of a model in turn:

    norm     add_rms_norm, linear: norm_linear (one row)
    rope     rope_kv_write, absorb_queries: rope_absorb
    router   add_rms_norm, linear of few outputs: norm_linear
    all      the four of norm and rope and, with one row, the two

The weights of a layer are read from memory. The floor is the time to read them. `--sweep` times the fused kernels with
other tiles, and names the best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import absorb_queries_triton, is_small
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb_triton
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write_triton
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.norm_linear import norm_linear_triton
from mla_router.worker.kernels.rms_norm import add_rms_norm_triton
from mla_router.worker.kernels.weight import PLAIN_ROWS, Weight

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record
from timing import floor_us, time_graph_us

LAYERS = 27
NOPE, ROPE, LATENT, PAGE, EPS = 128, 64, 512, 64, 1e-6
MODELS = {"V2-Lite": (2048, 16, 64), "V3": (7168, 128, 256)}  # hidden size, heads, experts
Q_LORA = {"V3": 1536}  # where the first projection gives the queries' latents
NORM_TILES = tuple(product((1, 2, 4, 8, 16), (4, 8, 16)))  # outputs of a program, warps
ROPE_TILES = tuple(product((32, 64, 128), (4, 8)))  # columns of a program, warps
MAX_REGISTERS = 96  # of a thread, of 32 bits, for weights alone: with more it would spill


@dataclass(frozen=True)
class Layer:
    norm_weight: Tensor
    projection: Tensor
    up: Tensor  # [H, 256, LATENT]
    router: Tensor

    @property
    def w_uk(self) -> Weight:
        return Weight(self.up[:, :NOPE], constant=True)


class Case:
    """Some rows of one model."""

    def __init__(self, model: str, rows: int) -> None:
        hidden, heads, experts = MODELS[model]
        width = heads * (NOPE + ROPE)
        outputs = Q_LORA.get(model, width) + LATENT + ROPE

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.layers = [
            Layer(
                normal(hidden),
                normal(outputs, hidden),
                normal(heads, 256, LATENT),
                normal(experts, hidden),
            )
            for _ in range(LAYERS)
        ]
        self.hidden_states, self.residual = normal(rows, hidden), normal(rows, hidden)
        self.rope = (
            normal(rows, heads, NOPE + ROPE),
            normal(rows, LATENT + ROPE),
            normal(LATENT),
            EPS,
            torch.polar(*torch.rand(2, rows, ROPE // 2, device="cuda")),
            normal(rows, PAGE, LATENT + ROPE),
            PAGE * torch.arange(rows, device="cuda"),
        )

    def norm_apart(self, layer: Layer) -> None:
        normed, _ = add_rms_norm_triton(self.hidden_states, self.residual, layer.norm_weight, EPS)
        linear(normed, Weight(layer.projection, constant=True))

    def norm_joined(self, layer: Layer, tiles: tuple[int, int] | None = None) -> None:
        norm_linear_triton(
            self.hidden_states,
            self.residual,
            layer.norm_weight,
            EPS,
            layer.projection,
            out_dtype=self.hidden_states.dtype,
            constant=True,
            tiles=tiles,
        )

    def rope_apart(self, layer: Layer) -> None:
        rope_kv_write_triton(*self.rope, interleaved=True)
        absorb_queries_triton(self.rope[0][..., :NOPE], layer.w_uk)

    def rope_joined(self, layer: Layer, columns: int | None = None, num_warps: int = 4) -> None:
        rope_absorb_triton(
            *self.rope,
            layer.w_uk,
            interleaved=True,
            columns=columns,
            num_warps=num_warps,
        )

    def router_apart(self, layer: Layer) -> None:
        normed, _ = add_rms_norm_triton(self.hidden_states, self.residual, layer.norm_weight, EPS)
        linear(normed, Weight(layer.router, constant=True), out_dtype=torch.float32)

    def router_joined(self, layer: Layer, tiles: tuple[int, int] | None = None) -> None:
        norm_linear_triton(
            self.hidden_states,
            self.residual,
            layer.norm_weight,
            EPS,
            layer.router,
            out_dtype=torch.float32,
            keep=PLAIN_ROWS,
            constant=True,
            tiles=tiles,
        )

    def time_us(self, *parts: Callable[[Layer], None]) -> float:
        turn = cycle(self.layers)

        def one() -> None:
            layer = next(turn)
            for part in parts:
                part(layer)

        return round(time_graph_us(one, launches=LAYERS, replays=20), 2)

    def parts(self, rows: int) -> Iterator[tuple[str, list[Any], list[Any], int]]:
        """Returns name, separate and fused kernels, and bytes of weights."""
        layer = self.layers[0]
        projection, absorbed = layer.projection.nbytes, layer.w_uk.values.numel() * 2
        one_row = rows == 1
        if one_row:
            yield "norm", [self.norm_apart], [self.norm_joined], projection
        yield "router", [self.router_apart], [self.router_joined], layer.router.nbytes
        if not is_small(rows, *layer.w_uk.values.shape):
            return
        yield "rope", [self.rope_apart], [self.rope_joined], absorbed
        norm = self.norm_joined if one_row else self.norm_apart
        yield (
            "all",
            [self.norm_apart, self.rope_apart],
            [norm, self.rope_joined],
            projection + absorbed,
        )


def sweep(case: Case, part: str) -> dict[str, Any]:
    times: dict[tuple[int, int], float] = {}
    if part in ("norm", "router"):
        joined = case.norm_joined if part == "norm" else case.router_joined
        width = case.layers[0].projection.shape[1]
        for outputs, warps in NORM_TILES:
            if outputs * width / (64 * warps) <= MAX_REGISTERS:
                times[outputs, warps] = case.time_us(
                    lambda layer, tiles=(outputs, warps): joined(layer, tiles)
                )
    elif part == "rope":
        for columns, warps in ROPE_TILES:
            times[columns, warps] = case.time_us(
                lambda layer, how=(columns, warps): case.rope_joined(layer, *how)
            )
    if not times:
        return {}
    best = min(times, key=lambda tiles: times[tiles])
    return {"best_us": times[best], "best": best, "times": [[*k, v] for k, v in times.items()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kept = []
    print(f"{'model':8} rows part    apart us  joined us    floor")
    for model, rows in product(args.models, args.rows):
        case = Case(model, rows)
        for part, apart, joined, moved in case.parts(rows):
            row = {
                "model": model,
                "rows": rows,
                "part": part,
                "apart_us": case.time_us(*apart),
                "joined_us": case.time_us(*joined),
                "floor_us": round(floor_us(moved_bytes=moved), 2),
            } | (sweep(case, part) if args.sweep else {})
            kept.append(row)
            print(
                f"{model:8} {rows:4d} {part:6} {row['apart_us']:8.2f} {row['joined_us']:10.2f} "
                f"{row['floor_us']:8.2f}  {row.get('best_us', '')} {row.get('best', '')}",
                flush=True,
            )
    record("joined", {"rows": kept}, args.out)


if __name__ == "__main__":
    main()
