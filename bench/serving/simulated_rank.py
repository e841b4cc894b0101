"""Times one rank of eight of DeepSeek-V3 on one GPU, with the others simulated.

    python bench/serving/simulated_rank.py --attention dp tp --layers 12

The engine is that of rank 0 of `--ranks`, with random weights of the real shapes, FP8, its experts (expert parallelism) and
all of the attention (`dp`: each rank has requests of its own) or its heads (`tp`: all ranks have the same requests). Its
exchange with the others is a loopback of the real sizes, which takes the modelled time of NVLink (`loopback.py`). Left
out are the waits of ranks for each other, whose loads differ, and the schedulers' agreement on steps.

With fewer `--layers` than the model has, the missing layers count like the last existing ones. The time of those is the
difference of two measurements, with and without them.
The batch sizes are requests a rank, also with `tp`: all ranks together have the same requests in both. Then a rank has the KV
cache of its own requests with `dp`, and of all with `tp`. The rows of N and N / `--ranks` requests have equal KV caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from bench_one_batch import Batch, floor_ms, read_speed, step_times
from kernel_shares import shares
from loopback import Link, LoopbackGroup, quantized_rows, random_rows
from mla_router.worker import flags
from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.choose import choose_device, choose_dtype
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.experts import Experts
from mla_router.worker.model.moe import Gate, MixtureOfExperts

SHAPE = Path(__file__).resolve().parents[1] / "shapes" / "deepseek-v3-fp8"
# Assumed, not measured: four fifths of the 450 GB/s that NVLink 4 has in each direction
LINK_GB_PER_S = 360.0
# Assumed, for a small collective of eight GPUs
LATENCY_US = 10.0
STEPS = 8


def parse_args() -> tuple[argparse.Namespace, WorkerConfig]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attention", nargs="+", choices=("dp", "tp"), default=["dp"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model")
    parser.add_argument("--batch-size", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--prefill-tokens", type=int, default=4096, help="of a rank; 0: none")
    parser.add_argument("--link-gb-per-s", type=float, default=LINK_GB_PER_S)
    parser.add_argument("--latency-us", type=float, default=LATENCY_US, help="of each collective")
    parser.add_argument(
        "--expert-rows", type=int, nargs="*", default=[], help="rows an expert, timed alone"
    )
    parser.add_argument("--kernels", action="store_true", help="print the split by kernels")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(temperature=0.0, output_len=STEPS + 2)
    flags.add_flags(parser)
    parser.set_defaults(model_path=str(SHAPE), load_format="dummy")
    args = parser.parse_args()
    return args, flags.from_namespace(args)


class Division(NamedTuple):
    """The requests of a rank, for `size` requests a rank in the group."""

    attention: str
    ranks: int

    def requests(self, size: int) -> int:
        """Returns the requests whose attention a rank computes."""
        return size if self.attention == "dp" else size * self.ranks

    def groups(self, link: Link, *rows: Tensor, all_to_all: bool) -> Groups:
        group = LoopbackGroup(self.ranks, link, *rows, all_to_all=all_to_all)
        if self.attention == "dp":
            return Groups(exchange=group, all_to_all=all_to_all)
        return Groups(attention=group)


def of_layers(folder: Path, layers: int, into: Path) -> int:
    """Writes the config of `folder` with its first `layers` layers, 0 for all. Returns the number of all layers."""
    raw = json.loads((folder / "config.json").read_text())
    whole = int(raw["num_hidden_layers"])
    raw["num_hidden_layers"] = layers or whole
    (into / "config.json").write_text(json.dumps(raw))
    return whole


def load(config: WorkerConfig, division: Division, args: argparse.Namespace) -> Engine:
    """Returns the engine of rank 0, with graphs of the batch sizes alone."""
    sizes = [division.requests(size) for size in args.batch_size]
    prefill = max(args.prefill_tokens, config.page_size)
    pages = 1 + (args.input_len + args.output_len) // config.page_size
    prompts = -(-prefill // args.input_len)
    slots = max([*sizes, prompts])
    own = dataclasses.replace(
        config,
        tp_size=args.ranks,
        ep_size=args.ranks,
        max_running_requests=slots,
        max_total_tokens=(slots + 1) * pages * config.page_size,
        max_prefill_tokens=prefill,
        chunked_prefill_size=prefill,
        context_length=2 * pages * config.page_size,
        cuda_graph_bs=",".join(map(str, sizes)),
        piecewise_cuda_graph_max_tokens=0,
        mem_fraction_static=0.97,
    )
    link = Link(1e9 * args.link_gb_per_s, 1e-6 * args.latency_us)
    model, device = read_config(own.folder), choose_device(own)
    dtype = choose_dtype(own, model, device)
    rows = random_rows(args.ranks, slots + prefill, model.hidden_size, dtype, device)
    sent: tuple[Tensor, ...] = (rows,)
    if division.attention == "dp":
        experts: Any = model
        with torch.device("meta"):
            rule = Gate(experts).rule
        sent += quantized_rows(rows, experts.num_experts, rule)
    groups = division.groups(link, *sent, all_to_all=own.moe_a2a_backend == "direct")
    return load_engine(own, groups, expert_parts=args.ranks)


def leave_out(engine: Engine, layers: int) -> None:
    """Leaves the first `layers` layers."""
    del engine.model.model.layers[layers:]
    engine.capture_graphs(engine.runners.sizes)


def admit(engine: Engine, requests: int, args: argparse.Namespace) -> Batch:
    """Returns a batch of `requests` whose prompts count as computed."""
    batch = Batch(engine, requests, args)
    step_times(engine, iter([batch.begin_without_prefill()]))
    return batch


def decode_ms(engine: Engine, requests: int, args: argparse.Namespace) -> float:
    """Returns the median milliseconds of a decode step."""
    batch, times = admit(engine, requests, args), list[float]()
    for _ in range(3):
        times += step_times(engine, batch.decode_plans(STEPS))[0][2:]
    return 1e3 * statistics.median(times)


def prefill_ms(engine: Engine, args: argparse.Namespace) -> float:
    """Returns the milliseconds of a step of `--prefill-tokens` tokens, in prompts of `--input-len`."""
    batch = Batch(engine, max(1, args.prefill_tokens // args.input_len), args)
    budget = args.prefill_tokens

    def once() -> float:
        return sum(step_times(engine, batch.prefill_plans(budget))[0])

    once()
    return 1e3 * min(once() for _ in range(3))


def mixtures(engine: Engine) -> list[MixtureOfExperts]:
    return [module for module in engine.model.modules() if isinstance(module, MixtureOfExperts)]


@torch.inference_mode()
def experts_us(engine: Engine, rows: int) -> float:
    """Returns the microseconds of a layer's routed experts on this rank, for `rows` rows of all ranks."""
    hidden = engine.model.config.hidden_size
    x = torch.randn(rows, hidden, dtype=engine.dtype, device=engine.device)
    calls = []
    for layer in mixtures(engine):
        assert isinstance(layer.experts, Experts)
        calls.append((layer.experts, *layer.gate(x)))

    def run() -> Tensor:
        return [experts(x, weights, ids) for experts, weights, ids in calls][-1]

    return seconds_on_device(run, engine.device) * 1e6 / len(calls)


def seconds_on_device(run: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of `run`, of a captured graph on a GPU; zero elsewhere, where `run` is run once."""
    run()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    del kept
    return statistics.median(times)


class Depths(NamedTuple):
    """Layers that are measured, those left after leaving some out, and those of the model."""

    measured: int
    left: int
    whole: int

    def extrapolate(self, measured: float, left: float) -> tuple[float, float]:
        """Returns a value of the whole model, and of one of the last layers, from the values of both depths."""
        each = (measured - left) / (self.measured - self.left)
        return measured + (self.whole - self.measured) * each, each


def simulate(
    config: WorkerConfig, division: Division, args: argparse.Namespace, whole: int
) -> list[dict[str, Any]]:
    """Returns a row for each batch size, one for a prefill step, and one for each of `--expert-rows`."""
    engine = load(config, division, args)
    speed = read_speed(engine.device)
    layers, sparse = len(engine.model.model.layers), len(mixtures(engine))
    if not sparse:
        raise SystemExit(f"--layers {layers}: none of them has experts")
    depths = Depths(layers, max(layers - sparse, layers // 2), whole)
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    print(f"weights of {layers} layers: {weights / 1e9:.1f} GB; reads {speed / 1e12:.2f} TB/s")

    def measure() -> dict[int, tuple[float, float]]:
        """Returns step and floor in milliseconds, by the requests a rank; 0: of the prefill step."""
        found = {}
        for size in args.batch_size:
            requests = division.requests(size)
            routed = size * division.ranks
            floor = floor_ms(engine, requests, args.input_len, speed, routed=routed)
            found[size] = decode_ms(engine, requests, args), floor
        if args.prefill_tokens:
            found[0] = prefill_ms(engine, args), 0.0
        return found

    deep = measure()
    experts = {size: experts_row(engine, size * args.ranks, speed) for size in args.batch_size}
    model: Any = engine.model.config
    alone = [
        {"attention": division.attention, "step": "experts", "rows_an_expert": rows}
        | experts_row(engine, rows * model.num_experts // model.experts_per_token, speed)
        for rows in args.expert_rows
    ]
    splits = kernel_splits(engine, division, args) if args.kernels else {}
    leave_out(engine, depths.left)
    shallow = measure()
    rows = []
    for size in deep:
        (step, each), (floor, _) = (
            depths.extrapolate(deep[size][i], shallow[size][i]) for i in range(2)
        )
        tokens = size * args.ranks or args.prefill_tokens * (
            args.ranks if division.attention == "dp" else 1
        )
        row = {
            "attention": division.attention,
            "step": "decode" if size else "prefill",
            "requests_a_rank": size,
            "layers": layers,
            "layer_us": round(1e3 * each, 1),
            "step_ms": round(step, 3),
            "floor_ms": round(floor, 3),
            "tokens_per_s_of_all": round(1e3 * tokens / step),
        }
        split = {"kernels_us": splits[size]} if size in splits else {}
        rows.append(row | experts.get(size, {}) | split)
    return rows + alone


def experts_row(engine: Engine, rows: int, speed: float) -> dict[str, float]:
    """Returns the microseconds of a layer's experts and their floor. `rows`: of all ranks."""
    floor_us = experts_floor_us(engine, rows, speed)
    return {
        "experts_us": round(experts_us(engine, rows), 1),
        "experts_floor_us": round(floor_us, 1),
    }


def kernel_splits(
    engine: Engine, division: Division, args: argparse.Namespace
) -> dict[int, dict[str, float]]:
    """Prints and returns the microseconds of the largest kernels of steps, by the requests a rank; 0: of the prefill step."""
    if engine.device.type != "cuda":
        raise SystemExit("--kernels: only a GPU has kernels")
    steps = {
        size: list(admit(engine, division.requests(size), args).decode_plans(STEPS))
        for size in args.batch_size[-1:]
    }
    if args.prefill_tokens:
        batch = Batch(engine, max(1, args.prefill_tokens // args.input_len), args)
        steps[0] = list(batch.prefill_plans(args.prefill_tokens))
    found = {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for size, plans in steps.items():
        with torch.profiler.profile(activities=activities) as profile:
            step_times(engine, iter(plans))
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        print(f"{division.attention}, {size or 'prefill'}, us of a step by kernel:")
        row = shares(events)
        each = row["steps"] / len(plans)
        found[size] = {
            kernel["name"]: round(kernel["us"] * each, 1) for kernel in row["kernels"][:20]
        }
        for name, us in found[size].items():
            print(f"  {us:9.1f}  {name}")
    return found


def experts_floor_us(engine: Engine, rows: int, speed: float) -> float:
    """Returns the microseconds in which the routed experts of a layer are read, if `rows` rows choose them at random."""
    experts = mixtures(engine)[0].experts
    nbytes = sum(parameter.nbytes for parameter in experts.parameters())
    config: Any = engine.model.config
    hit = 1 - (1 - config.experts_per_token / config.num_experts) ** rows
    return 1e6 * nbytes * hit / speed


def show(rows: list[dict[str, Any]], ranks: int, whole: int) -> None:
    print(
        "simulated  step     requests  step ms  floor ms  tokens/s of all  layer us  experts us  floor us"
    )
    steps = [row for row in rows if row["step"] != "experts"]
    for row in steps:
        print(
            f"{row['attention']:9s}  {row['step']:8s} {row['requests_a_rank']:8d} {row['step_ms']:8.2f} {row['floor_ms']:9.2f} "
            f"{row['tokens_per_s_of_all']:16,d} {row['layer_us']:9.1f} {row.get('experts_us', 0):11.1f} "
            f"{row.get('experts_floor_us', 0):9.1f}"
        )
    for row in rows:
        if row["step"] == "experts":
            print(
                f"{row['attention']:9s}  {row['rows_an_expert']} rows an expert: {row['experts_us']} us, floor {row['experts_floor_us']}"
            )
    by_size: dict[int, dict[str, float]] = {}
    for row in steps:
        by_size.setdefault(row["requests_a_rank"], {})[row["attention"]] = row[
            "tokens_per_s_of_all"
        ]
    for size, found in by_size.items():
        what = f"{size} requests a rank" if size else "prefill"
        if len(found) == 2:
            print(
                f"simulated: DP attention against TP attention, {what}: {found['dp'] / found['tp']:.2f}x"
            )
        # With TP attention each rank keeps the KV cache of all requests
        of_memory = by_size.get(size // ranks, {}) if size else {}
        if "dp" in found and "tp" in of_memory:
            print(
                f"simulated: with KV cache of {size} requests on each rank: {found['dp'] / of_memory['tp']:.2f}x"
            )
    if rows[0]["layers"] < whole:
        print(f"simulated: {rows[0]['layers']} of {whole} layers measured, the others extrapolated")


def main() -> None:
    args, config = parse_args()
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = of_layers(config.folder, args.layers, folder)
        own = dataclasses.replace(config, model_path=str(folder))
        for attention in args.attention:
            rows += simulate(own, Division(attention, args.ranks), args, whole)
            gc.collect()  # the engine with its graphs, before the next is loaded
    show(rows, args.ranks, whole)
    settings = {key: vars(args)[key] for key in ("ranks", "layers", "input_len", "prefill_tokens")}
    settings |= {"link_gb_per_s": args.link_gb_per_s, "latency_us": args.latency_us}
    settings["moe_a2a_backend"] = own.moe_a2a_backend
    record("simulated_rank", {"simulated": True, "config": settings, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
