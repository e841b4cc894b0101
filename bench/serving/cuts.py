"""The gain of each part of the engine: the same batches with one part removed or exchanged at a time.

    python bench/serving/cuts.py --model-path DIR [--cuts whole 'pages of 1'] [--out FILE]

Every cut is a process of `bench_one_batch.py` with the flags of `CUTS`. TPOT is the time of a decode step after
`--input-len` tokens, as a ratio to the whole engine for each batch size. `naive` caches keys and values of all heads
instead of MLA's latents, so fewer requests fit: `--contexts` compares both with as many requests as fit, up to 512.
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
from record import record

CUTS = {
    "whole": [],
    "no CUDA graphs": ["--disable-cuda-graph", "--piecewise-cuda-graph-max-tokens", "0"],
    "no early starts": ["--no-pdl"],
    "torch.compile": ["--enable-torch-compile"],
    "torch attention": ["--attention-backend", "torch", "--disable-cuda-graph"],
    "FlashInfer prefill": ["--attention-backend", "flashinfer"],
    "FlashInfer decode": ["--enable-flashinfer-mla"],
    "pages of 1": ["--page-size", "1"],
    "pages of 64": ["--page-size", "64"],
    "naive MLA": ["--disable-mla"],
}
ABSORBED_OR_NAIVE = ("whole", "naive MLA")


def one_batch(
    flags: list[str], sizes: list[int], length: int, rest: list[str]
) -> list[dict[str, Any]]:
    """Returns the rows of `bench_one_batch.py`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "line.jsonl"
        argv = ["--batch-size", *map(str, sizes), "--input-len", str(length), "--out", str(out)]
        graphs = ["--cuda-graph-bs", ",".join(map(str, sizes))] if all(sizes) else []
        script = HERE.with_name("bench_one_batch.py")
        command = [sys.executable, str(script), *argv, *graphs, *rest, *flags]
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout.decode()[-4000:]}")
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Any other flag goes to bench_one_batch.py.",
    )
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--cuts", nargs="+", choices=CUTS, default=list(CUTS))
    parser.add_argument("--out", type=Path)
    args, rest = parser.parse_known_args()

    cuts = {}
    for name in args.cuts:
        cuts[name] = rows = one_batch(CUTS[name], args.batch_size, args.input_len, rest)
        whole = cuts.get("whole", rows)
        figures = (
            f"{row['batch_size']:>5}: {row['tpot_ms']:7.2f} ms {row['tpot_ms'] / base['tpot_ms']:5.2f}x,"
            f" prefill {row['prefill_ms']:7.1f} ms {row['prefill_ms'] / base['prefill_ms']:5.2f}x"
            for row, base in zip(rows, whole, strict=True)
        )
        print(f"{name:20}" + "  ".join(figures), flush=True)
    full = {}
    for length in args.contexts:
        for name in ABSORBED_OR_NAIVE:
            (row,) = one_batch([*CUTS[name], "--no-prefill"], [0], length, rest)
            full[f"{name}, {length}"] = row
            print(
                f"{name:20} after {length:6} tokens, {row['batch_size']:4} requests fit:"
                f" {row['decode_tokens_per_s']:7} tokens/s, {row['tpot_ms']:.2f} ms a step",
                flush=True,
            )
    sizes = {"input_len": args.input_len, "flags": rest}
    record("cuts", {"config": sizes, "cuts": cuts, "as_many_as_fit": full}, args.out)


if __name__ == "__main__":
    main()
