"""Asks a served Gemma 2 of `train_gemma2.py` held-out questions, by OpenAI's client through the router:

    python bench/accuracy/ask_gemma2.py --model-path DIR --device cpu

The questions are the last ones of conversations. The exit status is 1 if a share of right answers is below --least.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from asking import CONFIG, add_flags, worker_flags
from tasks import OF_GEMMA2, Example, Maker
from tasks.example import ASSISTANT, BOS, EOS, USER

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from launched import launched
from record import record

MAX_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Question:
    messages: list[Any]
    answer: str


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_flags(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    draw = random.Random(f"questions {args.seed}")
    asked = {name: questions(draw, maker, args.questions) for name, (maker, _) in OF_GEMMA2.items()}
    with launched(worker_flags(args), workers=args.workers) as url:
        right = {
            name: asyncio.run(share_right(url, of_task, args.parallel))
            for name, of_task in asked.items()
        }
    for name, share in right.items():
        print(f"{name:16}{share:>8.1%}")
    config = {name: getattr(args, name) for name in CONFIG}
    shares = {name: round(share, 4) for name, share in right.items()}
    record("ask_gemma2", {"config": config, "right": shares}, args.out)
    return 1 if min(right.values()) < args.least else 0


def questions(draw: random.Random, maker: Maker, count: int) -> list[Question]:
    """Returns the last questions of `count` held-out conversations."""
    found: list[Question] = []
    while len(found) < count:
        example = maker(draw, True)
        if USER in example[0].text:  # not plain text
            found.append(last_question(example))
    return found


def last_question(example: Example) -> Question:
    """Returns the last question of a conversation in the form of the chat template."""
    messages: list[dict[str, str]] = []
    for part in example[:-1]:
        if part.is_answer:
            messages.append({"role": "assistant", "content": part.text.removesuffix(EOS)})
            continue
        system, _, asked = part.text.removeprefix(BOS).partition(USER)
        if system:
            messages.append({"role": "system", "content": system})
        messages.append({"role": "user", "content": asked.removesuffix(ASSISTANT)})
    return Question(messages, example[-1].text.removesuffix(EOS))


async def share_right(url: str, asked: Sequence[Question], parallel: int) -> float:
    """Asks for greedy answers, and returns the share of right ones."""
    places = asyncio.Semaphore(parallel)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:

        async def is_right(question: Question) -> bool:
            async with places:
                said = await api.chat.completions.create(
                    model="default",
                    messages=question.messages,
                    max_tokens=MAX_TOKENS,
                    temperature=0,
                )
            return said.choices[0].message.content == question.answer

        return sum(await asyncio.gather(*map(is_right, asked))) / len(asked)


if __name__ == "__main__":
    sys.exit(main())
