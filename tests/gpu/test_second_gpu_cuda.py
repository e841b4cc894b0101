"""A worker on the second GPU: the kernels run on the GPU of its tensors."""

from __future__ import annotations

import pytest
import torch

from support import processes

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_both_gpus_say_the_same() -> None:
    question = {"role": "user", "content": "What is 17 + 25?"}
    body = {"model": "mla-small", "messages": [question], "max_tokens": 16, "temperature": 0}
    flags: dict[str, processes.Flag] = {"device": "cuda", "dtype": "bfloat16", "cpu_threads": None}
    answers = []
    for gpu in (0, 1):
        with processes.worker(**flags, base_gpu_id=gpu) as worker:
            answer = processes.post_json(worker.url + "/v1/chat/completions", body)
            answers.append(answer["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]
    assert "42" in answers[0]
