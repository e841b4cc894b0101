"""Compares quantized weights and KV caches with float32: accuracy, and the divergence of the probabilities of tokens.

    python bench/accuracy/formats.py --num-questions 400            # 7 workers, one after the other
    python bench/accuracy/formats.py --formats kv_fp8_e4m3          # beside float32
    python bench/accuracy/formats.py --device cuda                  # beside bfloat16

For each format it starts a worker with the small model (or --model-path), asks the same questions (`run.py`) greedily,
and scores the same continuations (`kl.py`), which the first worker samples: in float32 on a CPU, in bfloat16 on a GPU.
The table has the KL divergence a token from the first worker's probabilities. The exit status is 1 if a format answers
more than --max-loss points fewer questions rightly than the first worker.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import kl
from run import measure, questions

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from mla_router.worker.kernels.kv_cache.fp8 import FORMATS as KV_FORMATS
from mla_router.worker.model.quantization.choose import ONLINE
from support import processes

PLAIN = "plain"  # as the checkpoint is, in the device's type
FORMATS: dict[str, dict[str, processes.Flag]] = {
    PLAIN: {},
    **{name: {"quantization": name} for name in ONLINE},
    **{f"kv_{name}": {"kv_cache_dtype": name} for name in KV_FORMATS},
    "fp8_kv_fp8_e4m3": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}
PIECE = 32  # tokens of `kl.measure`


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--num-shots", type=int, default=8)
    parser.add_argument("--num-questions", type=int, default=1319)
    parser.add_argument("--num-samples", type=int, default=16, help="continuations for KL")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a continuation")
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--max-loss", type=float, default=0.5, help="points of accuracy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-path", type=Path, help="default: the model that is shipped")
    parser.add_argument("--out", type=Path, help="file to append a JSON line a format to")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    asked = questions(args.num_shots, args.num_questions, args.seed)
    prompts = [question.prompt for question in asked[: args.num_samples]]
    samples: list[kl.Sample] = []
    accuracies = []
    print(f"{'format':12} accuracy  KL a token  max |d|")
    for name, flags in FORMATS.items():
        if name != PLAIN and name not in args.formats:
            continue
        flags = {"device": args.device} | flags
        with processes.worker(args.model_path, served_model_name="mla-small", **flags) as worker:
            _, result = measure(worker.url, asked, parallel=args.parallel)
            if not samples:
                samples = asyncio.run(kl.draw(worker.url, prompts, new_tokens=args.new_tokens))
            scored = kl.measure(worker.url, samples, piece=PIECE, name=name)
            row = asyncio.run(scored)[0]
        accuracies.append(result["accuracy"])
        print(f"{name:12} {result['accuracy']:8.2%}  {row.kl:10.2e}  {row.max_difference:.2e}")
        sizes = {"questions": len(asked), "shots": args.num_shots, "samples": len(samples)}
        config = sizes | {"new_tokens": args.new_tokens, "format": name, "flags": flags}
        figures = {"kl": row.kl, "max_difference": row.max_difference}
        record("formats", {"config": config, **result, **figures}, args.out)
    loss = 100 * (accuracies[0] - min(accuracies))
    return 1 if loss > args.max_loss else 0


if __name__ == "__main__":
    sys.exit(main())
