"""Steps with prompts as CUDA graphs, in pieces between which attention is launched kernel by kernel.

How many rows a step has decides what all of a layer launches but its attention, where lengths and the
division into chunks count as well. So the forward pass is recorded for some numbers of rows, and each
recording is cut where a layer asks for its attention (`ForwardBatch.attend`). A step takes the next larger
number; rows too many are an idle slot's and attend to nothing.

Without it a GPU waits for its host: some five hundred launches take longer than the work of a prompt of a
thousand tokens. `fresh_prompts.py` and `decode_rows.py` have the steps that need no cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.engine.alias import alias
from mla_router.worker.engine.padded_rows import PaddedRows
from mla_router.worker.engine.recordings import Recordings, record_sizes
from mla_router.worker.model.batch import Attend, ForwardBatch, Rows

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
    rows: Rows  # [size, ...] each
    cache: Tensor
    out: Tensor  # [size, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The recording of one number of rows: a graph, a cut, a graph, and so on."""

    rows: PaddedRows  # that the first graph reads
    graphs: list[torch.cuda.CUDAGraph]
    cuts: list[Cut]
    update: Tensor
    stream: Tensor

    @property
    def size(self) -> int:
        return self.rows.size

    def replay(self, batch: ForwardBatch, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Update and stream of the rows of `batch`, which are tokens, slots and positions `inputs` [3, T]; the
        next replay of any pieces writes over them."""
        rows = inputs.shape[1]
        self.rows.write(inputs)
        for graph, cut in zip(self.graphs, self.cuts, strict=False):
            graph.replay()
            of_step = tuple(tensor[:rows] for tensor in cut.rows)
            cut.attend(batch, of_step, cut.cache, cut.out[:rows])
        self.graphs[-1].replay()
        return self.update[:rows], self.stream[:rows]


def record_pieces(
    run_layers: RunLayers,
    compose: Compose,
    sizes: Sequence[int],
    *,
    idle_slot: int,
    device: torch.device,
) -> Recordings[Pieces]:
    """Record for each of `sizes`."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(size: int, pool: Any) -> Pieces:
        rows = PaddedRows(size, idle_slot, device)
        # Kernels are compiled and libraries set up before they are recorded.
        run_layers(compose(_Unattended, *rows.read()))
        torch.cuda.synchronize(device)
        return _record(run_layers, compose, rows, stream, pool)

    return Recordings(record_sizes("steps in pieces", record, sizes, device))


def _record(
    run_layers: RunLayers, compose: Compose, rows: PaddedRows, stream: torch.cuda.Stream, pool: Any
) -> Pieces:
    graphs: list[torch.cuda.CUDAGraph] = []
    cuts: list[Cut] = []

    def begin() -> None:
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=pool)

    class Cutting(ForwardBatch):
        def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
            graphs[-1].capture_end()
            cuts.append(Cut(attend, tuple(map(alias, rows)), cache, alias(out)))
            begin()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        begin()
        update, residual = run_layers(compose(Cutting, *rows.read()))
        graphs[-1].capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return Pieces(rows, graphs, cuts, alias(update), alias(residual))


class _Unattended(ForwardBatch):
    def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
        del attend, rows, cache
        out.zero_()
