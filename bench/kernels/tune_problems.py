"""The problems that `tune.py` solves: products of one shape, with their inputs and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch
from kernels.tune_shapes import DenseShape, ExpertsShape
from kernels.tune_space import (
    BF16,
    BLOCKS,
    FP8,
    Stage,
    candidates,
    candidates_of_few_rows,
    rows_of_dense,
    rows_of_experts,
)
from torch import Tensor

from mla_router.worker.kernels import quantized_few_rows as few_rows
from mla_router.worker.kernels.moe.align import Blocks, blocks_for, empty_blocks, moe_align
from mla_router.worker.kernels.moe.down_gemm import down_blocks
from mla_router.worker.kernels.moe.gate_up_gemm import Gated, gate_up_blocks
from mla_router.worker.kernels.moe.gemv import down_pairs, gate_up_pairs
from mla_router.worker.kernels.moe.quantized_experts import (
    grouped_products,
    hopper_rows,
    quantized_tiling,
)
from mla_router.worker.kernels.moe.quantized_gemm_hopper import NUM_WARPS
from mla_router.worker.kernels.moe.tiling import MoeShape, Tile, default_tiling
from mla_router.worker.kernels.quantize import quantize_rows_triton
from mla_router.worker.kernels.quantized_linear import (
    Tiles,
    library_rows,
    quantized_linear_triton,
    tiling,
)
from mla_router.worker.kernels.quantized_linear_hopper import most_rows
from mla_router.worker.kernels.tuned import TunedTile, dense_name, kind_of, moe_name
from mla_router.worker.kernels.weight import Quantized, Weight

E4M3, BLOCK = torch.float8_e4m3fn, (128, 128)
COLD_BYTES = 80 << 20  # of weights that take turns, so that none is in L2 when its turn comes
FEW_ROWS = (4, 8, 16)
DENSE_ROWS = (48, 64, 96, 128, 191)
MOE_TOKENS = (1, 2, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)
DECODE_ROWS = 128  # most steps of a server have up to so many


@dataclass(frozen=True)
class Job:
    """A kernel to compile: a tile of one product. `is_sorted`: its blocks are."""

    stage: Stage
    tile: TunedTile
    group: int = 128  # columns of quantized inputs that share a scale
    is_sorted: bool = True


@dataclass(frozen=True)
class Launch:
    """A product with its inputs. `weights` of them take turns."""

    product: Callable[[Weight, TunedTile], object]
    weights: list[Weight]

    def with_tile(self, tile: TunedTile) -> Callable[[], object]:
        turn = cycle(self.weights)
        return lambda: self.product(next(turn), tile)


class Problem(Protocol):
    """Products of one shape for several numbers of rows, with the names of their files."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def names(self, device: str) -> tuple[str, ...]: ...

    def jobs(self, size: int) -> Iterator[Job]:
        """Yields the kernels for `size` rows."""
        ...

    def rule(self, size: int) -> tuple[Job, ...]:
        """Returns the tiles that a worker without a table has. They are among `jobs`."""
        ...

    def launch(self, size: int, job: Job, inputs: Inputs) -> Launch:
        """Returns the product for tiles of the kind of `job`."""
        ...


class Inputs:
    """Tensors with random numbers on a GPU, or without memory on torch's meta device. Weights are kept from one call to the
    next of the same sizes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._weights: dict[tuple[int, ...], list[Weight]] = {}

    def weights(self, *sizes: int, dtype: torch.dtype) -> list[Weight]:
        """Returns several weights [..., N, K], which together do not fit into L2."""
        if sizes not in self._weights:
            num_bytes = torch.Size(sizes).numel() * dtype.itemsize
            copies = 1 if self.device == "meta" else min(max(1, COLD_BYTES // num_bytes + 1), 32)
            self._weights[sizes] = [self._weight(sizes, dtype) for _ in range(copies)]
        return self._weights[sizes]

    def rows(self, *sizes: int) -> Tensor:
        if self.device == "meta":
            return torch.empty(sizes, dtype=torch.bfloat16, device="meta")
        return torch.randn(sizes, dtype=torch.bfloat16, device=self.device)

    def quantized(self, rows: int, columns: int, group: int = BLOCK[1]) -> Quantized:
        x = self.rows(rows, columns)
        if self.device != "meta":
            return quantize_rows_triton(x, E4M3, group)
        scales = torch.empty(-(-columns // group), rows, device="meta").t()  # as on a GPU
        return Quantized(torch.empty(x.shape, dtype=E4M3, device="meta"), scales, group, x.dtype)

    def ids(self, tokens: int, shape: ExpertsShape) -> Tensor:
        """Returns the experts of each token, [tokens, top_k] int32: -1 for those of other ranks."""
        if self.device == "meta":
            return torch.empty(tokens, shape.top_k, dtype=torch.int32, device="meta")
        draw = torch.Generator(self.device).manual_seed(tokens)
        chances = torch.rand(tokens, shape.total, generator=draw, device=self.device)
        ids = chances.topk(shape.top_k).indices
        return torch.where(ids < shape.experts, ids, -1).int()

    def _weight(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Weight:
        if dtype != E4M3:
            return Weight(self.rows(*sizes), constant=True)
        blocks = *sizes[:-2], -(-sizes[-2] // BLOCK[0]), -(-sizes[-1] // BLOCK[1])
        scales = torch.full(blocks, 1e-3, device=self.device)
        values = torch.empty(sizes, dtype=torch.uint8, device=self.device)
        if self.device != "meta":
            # Without the exponent's highest bit no code is NaN
            values.random_(0, 256).bitwise_and_(0xBF)
        return Weight(values.view(E4M3), scales, BLOCK, constant=True)


@dataclass(frozen=True)
class Dense:
    """x @ weight.T with FP8 weights and rows."""

    shape: DenseShape
    rows: tuple[int, ...] = DENSE_ROWS

    @property
    def sizes(self) -> tuple[int, ...]:
        """Other kernels of Hopper have the rest (`quantized_linear.py`): the ring's, and the library's for large weights."""
        outputs, inputs = self.shape.outputs, self.shape.inputs
        below = library_rows(outputs * inputs) if inputs % BLOCK[1] == 0 else max(self.rows) + 1
        return tuple(rows for rows in self.rows if most_rows(outputs, inputs) < rows < below)

    def names(self, device: str) -> tuple[str, ...]:
        kind = kind_of(E4M3, BLOCK)
        return (dense_name(self.shape.outputs, self.shape.inputs, device, kind),)

    def jobs(self, size: int) -> Iterator[Job]:
        yield from self.rule(size)
        for rows in rows_of_dense(size):
            for tile in candidates("dense", rows, self.shape.inputs, FP8):
                yield Job("dense", tile)

    def rule(self, size: int) -> tuple[Job, ...]:
        tiles = tiling(size, self.shape.outputs)
        tile = TunedTile(
            tiles.rows,
            tiles.outputs,
            tiles.inputs,
            tiles.group_m,
            tiles.num_warps,
            tiles.num_stages,
        )
        return (Job("dense", tile),)

    def launch(self, size: int, job: Job, inputs: Inputs) -> Launch:
        del job
        shape = self.shape
        weights = inputs.weights(shape.outputs, shape.inputs, dtype=E4M3)
        x = inputs.quantized(size, shape.inputs)

        def product(weight: Weight, tile: TunedTile) -> Tensor:
            tiles = Tiles(
                tile.block_m,
                tile.block_n,
                tile.block_k,
                tile.num_warps,
                tile.num_stages,
                tile.group_m,
            )
            return quantized_linear_triton(x, weight, out_dtype=torch.bfloat16, tiles=tiles)

        return Launch(product, weights)


@dataclass(frozen=True)
class FewRows:
    """x @ weight.T with FP8 weights and a few rows of bfloat16."""

    shape: DenseShape
    rows: tuple[int, ...] = FEW_ROWS

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows for rows in self.rows if few_rows.is_few(rows, self.shape.inputs))

    def names(self, device: str) -> tuple[str, ...]:
        kind = kind_of(E4M3, BLOCK, activations=16)
        return (dense_name(self.shape.outputs, self.shape.inputs, device, kind),)

    def jobs(self, size: int) -> Iterator[Job]:
        yield from self.rule(size)
        for tile in candidates_of_few_rows(size, self.shape.inputs):
            yield Job("few rows", tile)

    def rule(self, size: int) -> tuple[Job, ...]:
        tiles = few_rows.tiling(size, self.shape.outputs, self.shape.inputs)
        rows = 8 if size <= 8 else 16
        tile = TunedTile(rows, tiles.outputs, 128, 1, tiles.num_warps, tiles.num_stages)
        return (Job("few rows", tile),)

    def launch(self, size: int, job: Job, inputs: Inputs) -> Launch:
        del job
        x = inputs.rows(size, self.shape.inputs)

        def product(weight: Weight, tile: TunedTile) -> Tensor:
            tiles = few_rows.Tiles(tile.block_n, tile.num_warps, tile.num_stages)
            return few_rows.few_rows_quantized(x, weight, out_dtype=x.dtype, tiles=tiles)

        return Launch(product, inputs.weights(self.shape.outputs, self.shape.inputs, dtype=E4M3))


@dataclass(frozen=True)
class Moe:
    """Both products of routed experts, with FP8 or plain weights."""

    shape: ExpertsShape
    dtype: torch.dtype
    tokens: tuple[int, ...] = MOE_TOKENS

    @property
    def number_bytes(self) -> int:
        return FP8 if self.dtype == E4M3 else BF16

    @property
    def sizes(self) -> tuple[int, ...]:
        """One token with FP8 weights has a kernel of its own, without a table."""
        return tuple(tokens for tokens in self.tokens if tokens > 1 or self.dtype != E4M3)

    def names(self, device: str) -> tuple[str, ...]:
        kind = kind_of(self.dtype, BLOCK)
        of_shape = (self.shape.experts, self.shape.width, device, kind)
        return moe_name(*of_shape, down=False), moe_name(*of_shape, down=True)

    def jobs(self, size: int) -> Iterator[Job]:
        yield from self.rule(size)
        shape = self.shape
        for rows in rows_of_experts(size, shape.top_k, shape.total, self.number_bytes):
            for tile in candidates("gate_up", rows, shape.hidden, self.number_bytes):
                yield Job("gate_up", tile, is_sorted=_is_sorted(size, tile))
            for tile in candidates("down", rows, shape.width, self.number_bytes):
                for group in (64, 128) if self.dtype == E4M3 else (128,):
                    if group % tile.block_k == 0 or self.dtype != E4M3:
                        yield Job("down", tile, group, _is_sorted(size, tile))

    def rule(self, size: int) -> tuple[Job, ...]:
        shape = self.shape
        if self.dtype == E4M3:
            sizes = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)
            pair = (Inputs("meta").weights(shape.experts, *each, dtype=E4M3)[0] for each in sizes)
            tiles = quantized_tiling(size, shape.top_k, shape.total, hopper_rows(*pair))
        else:
            of_rank = MoeShape(shape.experts, shape.hidden, shape.width, self.dtype)
            tiles = default_tiling(of_rank, size, shape.top_k)
        group = tiles.gate_up.block_n if self.dtype == E4M3 else 128
        gate_up, down = (_tuned(tiles.rows, tile) for tile in (tiles.gate_up, tiles.down))
        return (
            Job("gate_up", gate_up, is_sorted=_is_sorted(size, gate_up)),
            Job("down", down, group, _is_sorted(size, down)),
        )

    def launch(self, size: int, job: Job, inputs: Inputs) -> Launch:
        shape = self.shape
        ids = inputs.ids(size, shape)
        blocks = None if job.tile.block_m == 1 else self._blocks(ids, job)
        sizes = (2 * shape.width, shape.hidden)
        product = self._gate_up
        if job.stage == "down":
            sizes, product = (shape.hidden, shape.width), self._down
        weights = inputs.weights(shape.experts, *sizes, dtype=self.dtype)
        return Launch(product(size, ids, blocks, job, inputs), weights)

    def _gate_up(
        self, size: int, ids: Tensor, blocks: Blocks | None, job: Job, inputs: Inputs
    ) -> Callable[[Weight, TunedTile], object]:
        hidden = self.shape.hidden
        if blocks is not None and self.dtype == E4M3:
            quantized = inputs.quantized(size, hidden)
            gate_up, _ = grouped_products(job.tile.block_m, job.tile.num_warps)
            return lambda w, tile: gate_up(quantized, w, blocks, _tile(tile))
        x = inputs.rows(size, hidden)
        if blocks is None:
            return lambda w, tile: gate_up_pairs(x, w.values, ids, _tile(tile))
        return lambda w, tile: gate_up_blocks(x, w.values, blocks, _tile(tile))

    def _down(
        self, size: int, ids: Tensor, blocks: Blocks | None, job: Job, inputs: Inputs
    ) -> Callable[[Weight, TunedTile], object]:
        del size
        rows = ids.numel() if blocks is None else blocks.intermediate_rows
        width = self.shape.width
        if blocks is not None and self.dtype == E4M3:
            rounded = inputs.quantized(rows, width, job.group)
            _, down = grouped_products(job.tile.block_m, job.tile.num_warps)
            return lambda w, tile: down(rounded, w, blocks, _tile(tile))
        gated = inputs.rows(rows, width)
        if blocks is None:
            shares = torch.empty(ids.shape, device=ids.device).fill_(0.1)
            return lambda w, tile: down_pairs(gated, w.values, shares, ids, _tile(tile))
        return lambda w, tile: down_blocks(Gated(gated), w.values, blocks, _tile(tile))

    def _blocks(self, ids: Tensor, job: Job) -> Blocks:
        rows = job.tile.block_m
        if not job.is_sorted:
            return blocks_for(ids, self.shape.experts, rows)
        align = empty_blocks if ids.device.type == "meta" else moe_align
        return align(ids, self.shape.experts, rows)


def compile_size(problem: Problem, job: Job) -> int:
    """Returns the number of rows for compiling `job` without a GPU. Blocks are sorted from a certain number on."""
    if isinstance(problem, Dense):
        return max(BLOCKS)
    if isinstance(problem, FewRows):
        return job.tile.block_m
    return 2 * max(BLOCKS) if job.is_sorted else min(max(job.tile.block_m, 1), 2)


def _is_sorted(size: int, tile: TunedTile) -> bool:
    return size > tile.block_m or tile.num_warps == NUM_WARPS


def _tuned(rows: int, tile: Tile) -> TunedTile:
    return TunedTile(
        rows, tile.block_n, tile.block_k, tile.group_m, tile.num_warps, tile.num_stages
    )


def _tile(tile: TunedTile) -> Tile:
    return Tile(tile.block_n, tile.block_k, tile.group_m, tile.num_warps, tile.num_stages)
