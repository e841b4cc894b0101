"""Compares the answers under settings that should not change them.

    python bench/accuracy/settings.py --num-questions 1319          # 6 servers, one after the other

For each setting it starts a server with the small model (or --model-path) on the CPU, sends the same questions
(`run.py`) greedily, and counts the answers that differ from those of the first server, which has the defaults. In
float32 none should differ, except where two tokens are equally likely to the last bits. The exit status is 1 if an
answer differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from run import Answer, measure, questions

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from support import processes

SETTINGS: dict[str, dict[str, processes.Flag]] = {
    "defaults": {},
    "no prefix cache": {"disable_radix_cache": True},
    "chunks of 64": {"chunked_prefill_size": 64},
    "no overlap": {"disable_overlap_schedule": True},
    "two workers": {"dp_size": 2},
    "pages of 1": {"page_size": 1},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-shots", type=int, default=8)
    parser.add_argument("--num-questions", type=int, default=1319)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-path", type=Path, help="default: the model that is shipped")
    parser.add_argument("--out", type=Path, help="file to append a JSON line a setting to")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    asked = questions(args.num_shots, args.num_questions, args.seed)
    first: list[Answer] = []
    differing = 0
    for name, changed in SETTINGS.items():
        flags = {"dp_size": 1, "served_model_name": "mla-small"} | changed
        with processes.server(model_path=args.model_path, **flags) as server:
            answers, result = measure(server.url, asked, parallel=args.parallel)
        first = first or answers
        differ = sum(a.text != b.text for a, b in zip(answers, first, strict=True))
        differing += differ
        print(
            f"{name:16} accuracy {result['accuracy']:.2%}, {differ} of {len(asked)} answers differ"
        )
        config = {"questions": len(asked), "shots": args.num_shots, "flags": changed}
        record("accuracy", {"config": config, **result, "differ": differ}, args.out)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
