"""Decode graphs without a GPU: in the place of each stands what would be recorded in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mla_router.worker.engine import engine as engine_module
from mla_router.worker.engine.engine import Engine, GraphSizes
from mla_router.worker.engine.graphs import Decode, DecodeGraphs, Recording
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.kernels.kv_cache.locations import LookedUp


class Unrecorded:
    """Decodes again where a graph would be replayed."""

    def __init__(self, decode: Decode, rows: LookedUp) -> None:
        self._decode, self._rows = decode, rows
        self.logits = decode(rows)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.logits.copy_(self._decode(self._rows))


def replace_recording(
    engine: Engine, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[Unrecorded]:
    """Give `engine`, on the CPU, such graphs of `sizes`."""
    graphs: list[Unrecorded] = []

    def record(decode: Decode, _: object, sizes: Sequence[int], slots: SlotState) -> DecodeGraphs:
        recordings = []
        for size in sizes:
            looked_up = slots.look_up(slots.idle_rows(size))
            graphs.append(Unrecorded(decode, looked_up))
            recordings.append(Recording(graphs[-1], size, looked_up, graphs[-1].logits))  # type: ignore[arg-type]
        return DecodeGraphs(recordings)

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "record_graphs", record)
        engine.record_graphs(GraphSizes(sizes, []))
    return graphs
