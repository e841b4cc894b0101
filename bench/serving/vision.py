"""The vision tower of a model: tiles a second, decode steps beside it, and the prompt of an image.

    python bench/serving/vision.py --model-path bench/shapes/llava-onevision-7b --load-format dummy [--tiles 4 16] [--out FILE]

As the scheduler does, layers of a batch are launched between decode steps of `--batch-size` requests, and the next batch
begins when the one before is done. Tiles are random bytes.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from bench_one_batch import Batch, step_times
from mla_router.worker import flags
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.images import ImageInfo, ImageKind, ImagePart
from mla_router.worker.scheduler.images import SHARE, layers_within
from mla_router.worker.step.engine import PendingImages
from mla_router.worker.step.plan import ImageRows, PrefillChunk

REPEATS = 9
GREY = (0.5, 0.5, 0.5)


class Tower:
    """Batches of `tiles` tiles of one image, which is never whole, so that nothing else is launched."""

    def __init__(self, engine: Engine, tiles: int) -> None:
        assert engine.model.vision is not None, "a model without images"
        size = engine.model.vision.tile_size
        info = ImageInfo(1 << 40, ImageKind.TILED, 1, tiles + 1, size, size, 1 / 255, GREY, GREY)
        self.engine = engine
        self.tiles, self.num_layers = tiles, engine.model.vision.num_layers
        self.part = ImagePart(info, Random(0).randbytes(tiles * 3 * size * size))
        self.batches = 0
        self._batch = self.begin()

    def begin(self) -> PendingImages:
        self.batches += 1
        self._batch = self.engine.encode((self.part,), (self.part.info.key,))
        return self._batch

    def launch(self, seconds: float = math.inf) -> None:
        """Launches layers that take up to `seconds`."""
        if self._batch.layers_left:
            self.engine.encode_layers(layers_within(seconds, self._batch))

    def launched_tiles(self) -> float:
        """Returns the tiles since the start, those of the last batch by its layers."""
        return self.tiles * (self.batches - self._batch.layers_left / self.num_layers)

    def go_on(self, seconds: float) -> None:
        if self._batch.done():
            self.begin()
        self.launch(seconds)


def alone(engine: Engine, tiles: int) -> dict[str, float]:
    """Returns the milliseconds of a batch, and those in which the host launches it."""
    tower = Tower(engine, tiles)
    host, whole = [], []
    for _ in range(REPEATS):
        _synchronize(engine)
        begin = time.perf_counter()
        tower.begin()
        tower.launch()
        host.append(time.perf_counter() - begin)
        _synchronize(engine)
        whole.append(time.perf_counter() - begin)
    batch = statistics.median(whole)
    return {
        "batch_ms": round(1e3 * batch, 2),
        "host_ms": round(1e3 * statistics.median(host), 2),
        "tiles_per_s": round(tiles / batch, 1),
    }


def beside(
    engine: Engine, batch: Batch, steps: int, tiles: int, step_ms: float
) -> dict[str, float]:
    """Returns the milliseconds of decode steps of `batch`, with `tiles` at a time in the tower, or none. `step_ms`: of a
    step without them."""
    tower = Tower(engine, tiles) if tiles else None

    def plans() -> Any:
        for plan in batch.decode_plans(steps):
            if tower is not None:
                tower.go_on(SHARE * step_ms / 1e3)
            yield plan

    _synchronize(engine)
    begin = time.perf_counter()
    times = sorted(step_times(engine, plans())[0][1:])
    rate = 0 if tower is None else tower.launched_tiles() / (time.perf_counter() - begin)
    return {
        "step_ms": round(1e3 * statistics.median(times), 2),
        "step_p95_ms": round(1e3 * times[int(len(times) * 0.95)], 2),
        "step_p99_ms": round(1e3 * times[int(len(times) * 0.99)], 2),
        "tiles_per_s_beside": round(rate, 1),
    }


def prompts(engine: Engine, batch: Batch) -> dict[str, float]:
    """Returns the milliseconds of a step whose prompt is an image of one tile, and of one with as much text, each alone
    and beside decode rows of the other slots of `batch`."""
    encoder = engine.model.vision
    assert encoder is not None, "a model without images"
    size, rows = encoder.tile_size, encoder.format.tile_tokens + 1
    assert rows <= batch.length, f"a prompt of {rows} tokens in requests of {batch.length}"
    key = 1 << 41
    info = ImageInfo(key, ImageKind.SINGLE, rows, 1, size, size, 1 / 255, GREY, GREY)
    pending = engine.encode((ImagePart(info, Random(1).randbytes(3 * size * size)),), ())
    if pending.layers_left:
        engine.encode_layers(pending.layers_left)
    text = PrefillChunk(0, 0, (encoder.format.image_token,) * rows, is_last=True)
    image = replace(text, images=(ImageRows(row=0, count=rows, key=key, start=0),))
    decodes = replace(batch.decode_plan(0), decode_slots=tuple(range(1, batch.size)))
    decodes = replace(decodes, decode_bounds=decodes.decode_bounds[1:])
    found: dict[str, float] = {"prompt_rows": rows}
    for name, chunk in (("text", text), ("image", image)):
        for beside, plan in (
            ("", replace(decodes, decode_slots=(), decode_bounds=())),
            ("_beside", decodes),
        ):
            plan = replace(plan, chunks=(chunk,))
            times = []
            for _ in range(REPEATS):
                engine.slots.lengths.fill_(batch.length + 1)
                _synchronize(engine)
                times += step_times(engine, iter([plan]))[0]
            found[f"{name}{beside}_ms"] = round(1e3 * statistics.median(times), 2)
    return found


def _synchronize(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(temperature=0.0)
    flags.add_flags(parser)
    args = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    engine = load_engine(flags.from_namespace(args))
    rows: list[dict[str, float]] = []
    prompt: dict[str, float] = {}
    for tiles in [0, *args.tiles]:
        batch = Batch(engine, args.batch_size, args)
        step_times(engine, iter([batch.begin_without_prefill()]))
        own = alone(engine, tiles) if tiles else {}
        step_ms = rows[0]["step_ms"] if rows else 0.0
        steps = beside(engine, batch, args.output_len - 1, tiles, step_ms)
        prompt = prompt or prompts(engine, batch)
        row = {"tiles": tiles, **own, **steps}
        print("  ".join(f"{name} {value:g}" for name, value in row.items()), flush=True)
        rows.append(row)
    print("  ".join(f"{name} {value:g}" for name, value in prompt.items()), flush=True)
    names = ("batch_size", "input_len", "piecewise_cuda_graph_max_tokens")
    config = {name: getattr(args, name) for name in names}
    record("vision", {"config": config, "rows": rows, "prompts": prompt}, args.out)


if __name__ == "__main__":
    main()
