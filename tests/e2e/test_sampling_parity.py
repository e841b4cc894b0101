"""Settings that change greedy answers have the same effect as in `generate` of `transformers`, where they have the same
names."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from support import client, processes
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

NEW_TOKENS = 24


async def answers(
    url: str, requests: list[tuple[list[int], dict[str, Any]]]
) -> list[client.Answer]:
    """Sends all requests at once, so that one batch has different settings."""
    async with client.session() as http:

        async def ask(prompt: list[int], settings: dict[str, Any]) -> client.Answer:
            sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, **settings}
            body = {"input_ids": prompt, "sampling_params": sampling}
            async with http.post(url + "/generate", json=body) as response:
                return client.parse_answer(response.status, "", await response.text())

        return await asyncio.gather(*(ask(*request) for request in requests))


def test_greedy_answers_under_penalties_biases_and_least_lengths(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    torch.set_num_threads(1)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    rng = random.Random(5)
    requests, expected, changed = [], [], 0

    def generate(prompt: list[int], **settings: Any) -> list[int]:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else a token 0 in the prompt counts as padding
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            **settings,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    for n in range(12):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        plain = generate(prompt)
        ours: dict[str, Any] = {"ignore_eos": True}
        theirs: dict[str, Any] = {}
        if n % 2:
            penalty = rng.choice([0.8, 1.2, 2.0])
            ours |= {"repetition_penalty": penalty}
            theirs |= {"repetition_penalty": penalty}
        if n % 3:
            biases = {plain[rng.randrange(8)]: -100.0, rng.randrange(VOCAB_SIZE): 3.5}
            ours |= {"logit_bias": {str(token): value for token, value in biases.items()}}
            theirs |= {"sequence_bias": [[[token], value] for token, value in biases.items()]}
        if n % 4 > 1:
            stops, least = plain[2:6], rng.randint(4, 20)
            ours |= {"stop_token_ids": stops, "min_new_tokens": least}
            theirs |= {"eos_token_id": stops, "min_new_tokens": least}
        requests.append((prompt, ours))
        expected.append(generate(prompt, **theirs))
        changed += expected[-1] != plain
    assert changed >= 8, "the settings are to matter"

    with processes.worker(tmp_path, chunked_prefill_size=16) as worker:
        got = asyncio.run(answers(worker.url, requests))
    for request, answer, tokens in zip(requests, got, expected, strict=True):
        assert answer.status == 200, answer.body
        assert answer.tokens == tokens, request
