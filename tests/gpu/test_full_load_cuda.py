"""A worker whose KV cache has all available memory, under the most expensive load: no step runs out of memory.

The memory of a step is measured at the worker's start (`engine/working_memory.py`). So this load combines all features
that take memory: the most running requests, steps with the most prompt tokens, one of them after a very long prefix,
and for all requests penalties, random sampling and the logprobs of 20 tokens, for some of them those of their prompts
as well.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mla_router.worker.config import SMALL_MODEL
from support import processes

pytestmark = pytest.mark.gpu

SHAPE = processes.ROOT / "bench" / "shapes" / "deepseek-v2-lite" / "config.json"
REQUESTS, LONG_PROMPT = 1024, 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """V2-Lite with fewer layers: beside weights and cache, a step needs as much memory as with all 27."""
    path: Path = tmp_path_factory.mktemp("lite")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMALL_MODEL / name, path)
    config = json.loads(SHAPE.read_text()) | {"num_hidden_layers": 4}
    (path / "config.json").write_text(json.dumps(config))
    return path


def request(index: int) -> dict[str, Any]:
    length = LONG_PROMPT if index == 0 else 9000 if index % 64 == 0 else 200 + index % 400
    ids = [(index * 7919 + 31 * position) % 100_000 for position in range(length)]
    sampling = {
        "max_new_tokens": 24,
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.05,
        "frequency_penalty": 0.1,
        "ignore_eos": True,
    }
    body = {"input_ids": ids, "sampling_params": sampling}
    body |= {"return_logprob": True, "top_logprobs_num": 20}
    if index % 64 == 32:
        body |= {"logprob_start_len": 0}
    return body


async def all_answers(url: str) -> list[tuple[int, Any]]:
    limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(url, connector=limits[0], timeout=limits[1]) as http:

        async def answer(index: int) -> tuple[int, Any]:
            async with http.post("/generate", json=request(index)) as response:
                return response.status, await response.json()

        return await asyncio.gather(*(answer(index) for index in range(REQUESTS)))


def test_no_step_runs_out_of_memory(folder: Path) -> None:
    flags: dict[str, processes.Flag] = {
        "device": "cuda",
        "load_format": "dummy",
        "mem_fraction_static": 0.98,
        "max_running_requests": REQUESTS,
        "cpu_threads": None,
    }
    with processes.worker(folder, **flags) as worker:
        answers = asyncio.run(all_answers(worker.url))
        failed = [said for status, said in answers if status != 200]
        assert not failed, failed[0]
        for _, said in answers:
            assert said["meta_info"]["completion_tokens"] == 24
        assert "out of memory" not in worker.output()
        assert processes.status_of(worker.url + "/health") == 200
