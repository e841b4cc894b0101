"""Runs `bench_serving.py` against `launch_server`, with one setting changed at a time.

    python bench/serving/served.py --model-path DIR [--settings whole 'no overlap'] [--loads short] [--out FILE]

Each of `SETTINGS` is a new server with a router. It gets the loads one after the other, each with an empty cache.
`--divide 16` sends a sixteenth of the requests, for a test without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
from launched import launched
from record import record

# Workers, and flags
SETTINGS: dict[str, tuple[int, list[str]]] = {
    "whole": (1, []),
    "no overlap": (1, ["--disable-overlap-schedule"]),
    "1 server process": (1, ["--tokenizer-worker-num", "1"]),
    "2 workers": (2, []),
    "2 workers, round robin": (2, ["--router-policy", "round_robin"]),
    "DP attention": (2, ["--enable-dp-attention", "--tp-size", "2", "--ep-size", "2"]),
    "DP attention, 4 GPUs": (4, ["--enable-dp-attention", "--tp-size", "4", "--ep-size", "4"]),
}
ANSWERS = {"random-input-len": 256, "random-output-len": 128, "random-range-ratio": 1}
# The number of requests (of a group, for `shared`), and the other options of bench_serving.
LOADS: dict[str, tuple[int, dict[str, str | int]]] = {
    "short": (2000, {"random-input-len": 256, "random-output-len": 32, "random-range-ratio": 1}),
    "long": (1000, {"random-input-len": 1024, "random-output-len": 512, "random-range-ratio": 1}),
    "shared": (16, {"dataset-name": "generated-shared-prefix"}),
    "48 clients": (192, ANSWERS | {"max-concurrency": 48}),
    "96 clients": (384, ANSWERS | {"max-concurrency": 96}),
    "256 clients": (1024, ANSWERS | {"max-concurrency": 256}),
}
LOADS_OF_ALL = ["short", "long", "shared"]
FIGURES = {
    "request_throughput": "requests/s",
    "output_throughput": "out tok/s",
    "total_throughput": "all tok/s",
    "median_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "TPOT p50 ms",
    "median_itl_ms": "ITL p50 ms",
}


def options_of(load: str, divisor: int) -> list[str]:
    count, rest = LOADS[load]
    counted = "gsp-prompts-per-group" if load == "shared" else "num-prompts"
    options = {counted: max(1, count // divisor), **rest}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def under(load: str, url: str, divisor: int, processes: int) -> dict[str, Any]:
    """Returns the JSON line of `bench_serving.py`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "line.jsonl"
        script = str(HERE.with_name("bench_serving.py"))
        command = [sys.executable, script, "--base-url", url, "--flush-cache"]
        command += ["--output-file", str(out), *options_of(load, divisor)]
        command += ["--client-processes", str(processes)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout.decode()[-4000:]}")
        line: dict[str, Any] = json.loads(out.read_text())
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="Any other flag goes to launch_server."
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["whole"])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS_OF_ALL)
    parser.add_argument("--divide", type=int, default=1, help="requests of a load by this number")
    parser.add_argument("--client-processes", type=int, default=1, help="that share the requests")
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args()

    print(f"{'':32}" + "".join(f"{title:>13}" for title in FIGURES.values()) + "  cached")
    kept: dict[str, Any] = {}
    for name in args.settings:
        workers, own = SETTINGS[name]
        with launched([*flags, *own], workers=workers) as url:
            for load in args.loads:
                line = under(load, url, args.divide, args.client_processes)
                kept[f"{name}, {load}"] = line
                figures = "".join(f"{line[key]:13.1f}" for key in FIGURES)
                share = line["cached_share"]
                print(f"{f'{name}, {load}':32}{figures}{share:8.1%}", flush=True)
    config = {"flags": flags, "divide": args.divide, "clients": args.client_processes}
    record("served", {"config": config, "runs": kept}, args.out)


if __name__ == "__main__":
    main()
