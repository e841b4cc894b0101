"""Measures the accuracy of a served model with few-shot questions through the OpenAI API.

    python -m mla_router.launch_server --dp-size 2                 # in another terminal
    python bench/accuracy/run.py --base-url http://127.0.0.1:30000 --num-questions 1319

Every prompt begins with the same `--num-shots` worked examples, as in GSM8K, so the prefix cache is used. The
questions are held out of the small model's training. `--save` keeps all answers, and `--compare` counts the answers
that differ from those of another run. `settings.py` compares settings that should not change answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tasks import arithmetic
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from record import record


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    expected: str  # the last number of the answer


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    tokens: int
    cached_tokens: int

    @property
    def number(self) -> str | None:
        """The number at the end of the answer; None if there is none."""
        last = self.text.strip().removesuffix(".").rpartition(" ")[2]
        return last if last.removeprefix("-").isdigit() else None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="mla-small")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--num-shots", type=int, default=8)
    parser.add_argument("--num-questions", type=int, default=1319)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="file for the answers")
    parser.add_argument("--compare", type=Path, help="answers of another run")
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def questions(shots: int, count: int, seed: int) -> list[Question]:
    draw = random.Random(seed)
    shown = [arithmetic.one_story(draw, held_out=False) for _ in range(shots)]
    prefix = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in shown)
    made = []
    for _ in range(count):
        asked, answer = arithmetic.one_story(draw, held_out=True)
        expected = answer.removesuffix(".").rpartition(" ")[2]
        made.append(Question(f"{prefix}Question: {asked}\nAnswer:", expected))
    return made


async def ask_all(
    url: str,
    asked: list[Question],
    *,
    parallel: int,
    model: str = "mla-small",
    max_tokens: int = 64,
    api_key: str = "",
) -> list[Answer]:
    """Returns the greedy answers, in the order of the questions. Raises SystemExit if the server refuses one."""
    places = asyncio.Semaphore(parallel)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        with tqdm(total=len(asked), desc="Asking", disable=None) as progress:

            async def ask(question: Question) -> Answer:
                body = {
                    "model": model,
                    "prompt": question.prompt,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "stop": ["\n"],
                }
                async with places, http.post("/v1/completions", json=body) as response:
                    said: dict[str, Any] = await response.json()
                if response.status != 200:
                    raise SystemExit(f"the server answered {response.status}: {said}")
                progress.update()
                usage = said["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                return Answer(said["choices"][0]["text"], usage["completion_tokens"], cached)

            return await asyncio.gather(*map(ask, asked))


def measure(url: str, asked: list[Question], **how: Any) -> tuple[list[Answer], dict[str, Any]]:
    """Returns the answers and their summary. `how`: see `ask_all`."""
    begin = time.perf_counter()
    try:
        answers = asyncio.run(ask_all(url, asked, **how))
    except aiohttp.ClientConnectionError as error:
        raise SystemExit(f"{url}: {error}; start a server (`--help` of launch_server)") from None
    latency = time.perf_counter() - begin
    right = sum(a.number == q.expected for a, q in zip(answers, asked, strict=True))
    return answers, {
        "accuracy": round(right / len(asked), 4),
        "invalid": round(sum(answer.number is None for answer in answers) / len(asked), 4),
        "latency_s": round(latency, 2),
        "output_throughput": round(sum(answer.tokens for answer in answers) / latency, 1),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
    }


def main() -> None:
    args = parse_args()
    asked = questions(args.num_shots, args.num_questions, args.seed)
    answers, result = measure(
        args.base_url,
        asked,
        parallel=args.parallel,
        model=args.model,
        max_tokens=args.max_tokens,
        api_key=args.api_key,
    )
    result["config"] = {"questions": len(asked), "shots": args.num_shots}
    if args.save:
        args.save.write_text(json.dumps([answer.text for answer in answers]))
    if args.compare:
        others = json.loads(args.compare.read_text())
        if len(others) != len(answers):
            raise SystemExit(f"{args.compare}: {len(others)} answers, not {len(answers)}")
        result["differ"] = sum(a.text != other for a, other in zip(answers, others, strict=True))
    for name, value in result.items():
        print(f"{name:18} {value}")
    record("accuracy", result, args.out)


if __name__ == "__main__":
    main()
