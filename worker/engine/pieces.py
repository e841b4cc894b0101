"""Steps with prompts as CUDA graphs, in pieces between which attention is launched kernel by kernel.

How many rows a step has decides what all of a layer launches but its attention, where lengths and the
division into chunks count as well. So the forward pass is recorded for some numbers of rows, and each
recording is cut where a layer asks for its attention (`ForwardBatch.attend`). A step takes the next larger
number; rows too many are an idle slot's and attend to nothing.

Without it a GPU waits for its host: some five hundred launches take longer than the work of a prompt of a
thousand tokens.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mla_router.worker.engine.alias import alias
from mla_router.worker.model.batch import Attend, ForwardBatch

logger = logging.getLogger(__name__)

# Update and stream of all rows of a batch: `Decoder.run_layers` over the engine's cache.
RunLayers = Callable[[ForwardBatch], tuple[Tensor, Tensor]]
# From tokens, slots and positions of rows, the batch that they are, of the class that is given.
Compose = Callable[[type[ForwardBatch], Tensor, Tensor, Tensor], ForwardBatch]


def piece_sizes(largest: int) -> list[int]:
    """Numbers of rows worth a recording: powers of two and what lies halfway between."""
    sizes = [16]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last * 3 // 2 if last & (last - 1) == 0 else last // 3 * 4)
    return [size for size in sizes if size <= largest]


@dataclass(frozen=True, slots=True)
class Cut:
    """A layer's attention: what the model wants called, with memory that the pieces around it use."""

    attend: Attend
    q: Tensor  # [size, ...]
    cache: Tensor
    out: Tensor  # [size, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The recording of one number of rows: a graph, a cut, a graph, and so on."""

    size: int
    inputs: Tensor  # [3, size] int64: tokens, slots and positions that the first graph reads
    graphs: list[torch.cuda.CUDAGraph]
    cuts: list[Cut]
    update: Tensor
    stream: Tensor

    def replay(self, batch: ForwardBatch, slots: Tensor, idle_slot: int) -> tuple[Tensor, Tensor]:
        """Update and stream of the rows of `batch`; the next replay of any pieces writes over them."""
        rows = len(slots)
        self.inputs[0, :rows] = batch.tokens
        self.inputs[1, :rows] = slots
        self.inputs[2, :rows] = batch.positions
        if rows < self.size:
            self.inputs[1, rows:] = idle_slot
            self.inputs[2, rows:] = 0
        for graph, cut in zip(self.graphs, self.cuts, strict=False):
            graph.replay()
            cut.attend(batch, cut.q[:rows], cut.cache, cut.out[:rows])
        self.graphs[-1].replay()
        return self.update[:rows], self.stream[:rows]


class PieceGraphs:
    """Recordings of some numbers of rows."""

    def __init__(self, recordings: Sequence[Pieces] = ()) -> None:
        self._recordings = sorted(recordings, key=lambda pieces: pieces.size)
        self._sizes = [pieces.size for pieces in self._recordings]

    def fitting(self, rows: int) -> Pieces | None:
        at = bisect_left(self._sizes, rows)
        return self._recordings[at] if at < len(self._sizes) else None


def record_pieces(
    run_layers: RunLayers,
    compose: Compose,
    sizes: Sequence[int],
    *,
    idle_slot: int,
    device: torch.device,
) -> PieceGraphs:
    """Record for each of `sizes`. All recordings share their memory: only one of them runs at a time.
    Says how long it took and how much memory."""
    begin, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The largest first: the others fit into the memory that it has asked for.
    progress = tqdm(sorted(sizes, reverse=True), desc="Recording steps in pieces", disable=None)
    recordings = []
    for size in progress:
        inputs = torch.zeros(3, size, dtype=torch.int64, device=device)
        inputs[1] = idle_slot
        # Kernels are compiled and libraries set up before they are recorded.
        run_layers(compose(_Unattended, *inputs.unbind()))
        torch.cuda.synchronize(device)
        recordings.append(_record(run_layers, compose, inputs, stream, pool))
    logger.info(
        "Steps of %d sizes up to %d rows recorded in pieces: %.1f s, %.0f MB",
        len(sizes),
        max(sizes),
        time.perf_counter() - begin,
        (free - torch.cuda.mem_get_info(device)[0]) / 1e6,
    )
    return PieceGraphs(recordings)


def _record(
    run_layers: RunLayers, compose: Compose, inputs: Tensor, stream: torch.cuda.Stream, pool: Any
) -> Pieces:
    graphs: list[torch.cuda.CUDAGraph] = []
    cuts: list[Cut] = []

    def begin() -> None:
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=pool)

    class Cutting(ForwardBatch):
        def attend(self, attend: Attend, q: Tensor, cache: Tensor, out: Tensor) -> None:
            graphs[-1].capture_end()
            cuts.append(Cut(attend, alias(q), cache, alias(out)))
            begin()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        begin()
        update, residual = run_layers(compose(Cutting, *inputs.unbind()))
        graphs[-1].capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return Pieces(inputs.shape[1], inputs, graphs, cuts, alias(update), alias(residual))


class _Unattended(ForwardBatch):
    def attend(self, attend: Attend, q: Tensor, cache: Tensor, out: Tensor) -> None:
        del attend, q, cache
        out.zero_()
