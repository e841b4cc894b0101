# /// script
# dependencies = ["aiohttp", "numpy", "requests", "tqdm", "transformers>=5"]
# ///
"""The file bench_serving.py of sglang==0.4.0, on /v1/completions and /generate."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import Server, command, main

SGLANG = "sglang==0.4.0"
PROMPTS = 12


def _bench(server: Server, backend: str, *words: str) -> None:
    folder = server.folder / backend
    folder.mkdir()
    # The package requires torch and a GPU, but the benchmark does not use it.
    uv = os.environ["UV"]
    package = folder / "package"
    command(uv, "pip", "install", "-q", "--no-deps", "--target", package, SGLANG, cwd=folder)
    out = folder / "out.jsonl"
    command(
        *("python", package / "sglang/bench_serving.py", "--backend", backend),
        *("--base-url", server.url, "--tokenizer", server.tokenizer, "--output-file", out),
        *("--max-concurrency", "4", *words),
        cwd=folder,
        HF_HUB_OFFLINE="1",
        HOME=str(folder),  # it stores prompts there
    )
    assert json.loads(out.read_text())["completed"] == PROMPTS


def _sharegpt(folder: Path) -> Path:
    path = folder / "sharegpt.json"
    turns = [{"value": "What is it that a router keeps of a prompt?"}, {"value": "Where it went."}]
    path.write_text(json.dumps([{"conversations": turns}] * PROMPTS))
    return path


def random_prompts_on_completions(server: Server) -> None:
    data = ("--dataset-name", "random", "--dataset-path", str(_sharegpt(server.folder)))
    lengths = ("--random-input-len", "64", "--random-output-len", "16")
    _bench(server, "vllm", *data, *lengths, "--random-range-ratio", "1", "--num-prompts", "12")


def shared_prefixes_on_generate(server: Server) -> None:
    groups = ("--gen-num-groups", "3", "--gen-prompts-per-group", "4")
    lengths = ("--gen-system-prompt-len", "64", "--gen-question-len", "16", "--gen-output-len", "8")
    _bench(server, "sglang", "--dataset-name", "generated-shared-prefix", *groups, *lengths)


main(random_prompts_on_completions, shared_prefixes_on_generate)
