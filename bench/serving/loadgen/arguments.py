"""The command line, with the names of SGLang's options."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from loadgen.apis import BACKENDS

Number = TypeVar("Number", int, float)

DATASETS = ("random", "sharegpt", "generated-shared-prefix", "multi-turn")


def parse(description: str, words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    _server(parser)
    _traffic(parser)
    _requests(parser)
    _datasets(parser)
    args = parser.parse_args(words)
    args.base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    if args.tokenize_prompt and (
        args.backend.endswith("-chat") or args.dataset_name == DATASETS[3]
    ):
        parser.error("--tokenize-prompt: chats and conversations are text")
    return args


def _server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="sglang-oai",
        help="sglang-oai, vllm: /v1/completions; -chat: /v1/chat/completions; sglang: /generate",
    )
    group.add_argument("--base-url", help="instead of host and port")
    group.add_argument("--host", default="127.0.0.1", help=" ")
    group.add_argument("--port", type=int, default=30000, help=" ")
    group.add_argument("--model", help="default: the first that the server lists")
    group.add_argument(
        "--tokenizer", type=Path, help="folder with tokenizer.json; default: the server's own"
    )
    group.add_argument(
        "--request-timeout", type=_above(float, 0), default=3600.0, help="seconds for one answer"
    )


def _traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--num-prompts", type=_above(int, 0), default=1000, help="or conversations")
    group.add_argument(
        "--request-rate",
        type=_above(float, 0),
        default=math.inf,
        help="arrivals a second, as a Poisson process; inf: all at once",
    )
    group.add_argument(
        "--max-concurrency", type=_above(int, 0), help="requests (conversations) at a time"
    )
    group.add_argument(
        "--client-processes",
        type=_above(int, 0),
        default=1,
        help="that share the requests; for servers that are faster than one client",
    )
    group.add_argument("--seed", type=int, default=1, help="of prompts, lengths and arrivals")
    group.add_argument(
        "--warmup-requests", type=_above(int, -1), default=1, help="sent before, and not counted"
    )
    group.add_argument("--flush-cache", action="store_true", help="after the warm-up")
    group.add_argument(
        "--profile", action="store_true", help="have the server's profiler run meanwhile"
    )
    group.add_argument("--output-file", type=Path, help="file to append the JSON line to")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--disable-stream", action="store_true", help=" ")
    group.add_argument(
        "--disable-ignore-eos", action="store_true", help="let answers end before their length"
    )
    group.add_argument(
        "--extra-request-body", type=_json_object, default={}, metavar="JSON", help="more fields"
    )
    group.add_argument(
        "--tokenize-prompt", action="store_true", help="send token ids: lengths are exact"
    )


def _datasets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-name", choices=DATASETS, default="random", help=" ")
    parser.add_argument(
        "--dataset-path", type=Path, help="ShareGPT's JSON file; for random: take its words"
    )
    parser.add_argument(
        "--sharegpt-output-len", type=_above(int, 3), help="default: that of the file's answer"
    )
    positive = _above(int, 0)
    for name, default, said in (
        ("random-input-len", 1024, "tokens, at most"),
        ("random-output-len", 1024, "tokens, at most"),
        ("gsp-num-groups", 64, "system prompts"),
        ("gsp-prompts-per-group", 16, "questions for each"),
        ("gsp-system-prompt-len", 2048, "tokens"),
        ("gsp-question-len", 128, "tokens"),
        ("gsp-output-len", 256, "tokens"),
        ("multi-turn-rounds", 5, "turns of each of --num-prompts conversations"),
        ("multi-turn-system-prompt-len", 512, "tokens that all conversations begin with"),
        ("multi-turn-input-len", 128, "tokens of a turn"),
        ("multi-turn-output-len", 128, "tokens of an answer"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=said)
    parser.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        help="shortest length as a share of the longest; 1: all the same",
    )


def _above(kind: Callable[[str], Number], least: int) -> Callable[[str], Number]:
    def convert(text: str) -> Number:
        value = kind(text)
        if not value > least:
            raise argparse.ArgumentTypeError(f"must be above {least}, got {text}")
        return value

    return convert


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
