"""Asks a served LLaVA-OneVision of `train_llava.py` held-out questions about pictures, by OpenAI's client through the router:

    python bench/accuracy/ask_pictures.py --model-path DIR --device cpu

Besides the share of right answers for each task: the cached tokens of a picture that comes again, and pairs of different
pictures of one size with the same question, asked in turns. Mixed up is an answer that is right for the other picture of the
pair; changed is one that differs the second time, which rounding may do. Videos need PyAV, and are left out without it.
The exit status is 1 if a share is below --least, or if a pair is mixed up. A model that guesses may hit the other answer.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.util
import io
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from asking import CONFIG, add_flags, worker_flags
from pictures.drawing import Picture
from pictures.tasks import SINGLE, SIZES, TASKS, Problem
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from launched import launched
from record import record

MAX_TOKENS = 16
FRAMES_PER_SECOND = 8


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_flags(parser)
    parser.add_argument("--pairs", type=int, default=40)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    with launched(worker_flags(args), workers=args.workers) as url:
        result = asyncio.run(measure(url, args))
    for name, value in result.items():
        print(f"{name:16}{value}")
    config = {name: getattr(args, name) for name in (*CONFIG, "pairs")}
    record("ask_pictures", {"config": config, **result}, args.out)
    least = min(result["right"].values())
    return 1 if least < args.least or result["mixed_up"] or not result["least_cached"] else 0


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(f"questions {args.seed}")
    names = [name for name in TASKS if name != "frames" or importlib.util.find_spec("av")]
    asked = {name: problems(draw, name, args.questions) for name in names}
    pairs = [pair(draw) for _ in range(args.pairs)]
    right: dict[str, float] = {}
    begin = time.perf_counter()
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        for name, of_task in asked.items():
            answers = await ask_all(api, name, of_task, args.parallel)
            correct = sum(a.text == p.answer for a, p in zip(answers, of_task, strict=True))
            right[name] = correct / len(of_task)
        seconds = time.perf_counter() - begin
        mixed_up, changed, cached, of_other = 0, 0, [], []
        for one, other in pairs:
            first, second, again, again_other = [
                await ask(api, "digits", problem) for problem in (one, other, one, other)
            ]
            mixed_up += sum(answer.text == other.answer for answer in (first, again))
            mixed_up += sum(answer.text == one.answer for answer in (second, again_other))
            changed += first.text != again.text
            changed += second.text != again_other.text
            cached += [again.cached_tokens / again.prompt_tokens]
            cached += [again_other.cached_tokens / again_other.prompt_tokens]
            of_other.append(second.cached_tokens)
    return {
        "right": {name: round(share, 4) for name, share in right.items()},
        "questions_per_s": round(sum(map(len, asked.values())) / seconds, 1),
        "mixed_up": mixed_up,
        "changed": changed,
        "least_cached": round(min(cached), 3),
        "cached_of_another_picture": max(of_other),
    }


def problems(draw: random.Random, name: str, count: int) -> list[Problem]:
    sizes = SIZES if name in SINGLE else SIZES[:1]
    return [TASKS[name](draw, sizes[index % len(sizes)], True) for index in range(count)]


def pair(draw: random.Random) -> tuple[Problem, Problem]:
    """Returns two pictures of one size with different numbers and the same question."""
    one = TASKS["digits"](draw, SIZES[1], True)
    while True:
        other = TASKS["digits"](draw, SIZES[1], True)
        if other.question == one.question and other.answer != one.answer:
            return one, other


async def ask_all(
    api: openai.AsyncOpenAI, name: str, asked: Sequence[Problem], parallel: int
) -> list[Answer]:
    places = asyncio.Semaphore(parallel)

    async def one(problem: Problem) -> Answer:
        async with places:
            return await ask(api, name, problem)

    return await asyncio.gather(*map(one, asked))


async def ask(api: openai.AsyncOpenAI, name: str, problem: Problem) -> Answer:
    """Returns the greedy answer."""
    parts: list[Any] = []
    if name == "frames":
        url = data_url("video/mp4", video(problem.pictures))
        parts.append({"type": "video_url", "video_url": {"url": url}})
    else:
        urls = [data_url("image/png", png(picture)) for picture in problem.pictures]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": problem.question})
    said = await api.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": parts}],
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    usage = said.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Answer(said.choices[0].message.content or "", usage.prompt_tokens, cached)


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(picture: Picture) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def video(frames: Sequence[Picture]) -> bytes:
    """Returns an MP4 file."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000  # the changes of colours are whole new pictures
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
