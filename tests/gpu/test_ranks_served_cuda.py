"""Several GPUs, with tensor parallelism and with DP attention, and NextN drafts on two: the answers are those of one GPU
without drafts.

In float32, so that rounding does not decide between near tokens. Steps run as CUDA graphs, and sums over the ranks by NCCL or
our own kernels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from support import processes
from support.processes import Flag
from support.streams import answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# Small, so that several servers fit on the GPUs
ON_GPU: dict[str, Flag] = {
    "device": "cuda",
    "dtype": "float32",
    "cpu_threads": None,
    "max_total_tokens": 16384,
    "max_running_requests": 16,
}
REQUESTS = 12
NEXTN: dict[str, dict[str, Flag]] = {
    "1 draft": {"speculative_num_steps": 1},
    "3 drafts": {"speculative_num_steps": 3},
    "trees": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    },
}


@pytest.fixture(scope="module")
def alone() -> Iterator[list[tuple[str, str | None, int]]]:
    with processes.worker(**ON_GPU) as worker:
        yield asyncio.run(answers(worker.url, REQUESTS))


@pytest.mark.parametrize("drafts", NEXTN)
@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (1, {"tp_size": 2}),
        (1, {"tp_size": 2, "ep_size": 2}),
        (2, {"tp_size": 2, "ep_size": 2, "enable_dp_attention": True}),
    ],
    ids=["tp", "ep", "dp"],
)
def test_drafts_change_no_answer(
    alone: list[tuple[str, str | None, int]], workers: int, flags: dict[str, Flag], drafts: str
) -> None:
    nextn = {"speculative_algorithm": "NEXTN", **NEXTN[drafts]}
    with processes.server(dp_size=workers, **ON_GPU, **flags, **nextn) as server:
        assert asyncio.run(answers(server.url, REQUESTS)) == alone
        for worker in processes.workers(server.url):
            stats = processes.get_json(worker["url"] + "/get_server_info")["scheduler"]
            assert stats["accepted_tokens"] > 0, stats


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (1, {"tp_size": 4}),
        (1, {"tp_size": 4, "ep_size": 2}),
        (4, {"tp_size": 4, "ep_size": 4, "enable_dp_attention": True}),
        (2, {"tp_size": 4, "ep_size": 2, "enable_dp_attention": True}),
    ],
    ids=["tp", "ep", "dp", "dp x tp"],
)
def test_four_gpus_change_no_answer(
    alone: list[tuple[str, str | None, int]], workers: int, flags: dict[str, Flag]
) -> None:
    with processes.server(dp_size=workers, **ON_GPU, **flags) as server:
        assert asyncio.run(answers(server.url, REQUESTS)) == alone
