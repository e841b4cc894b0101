"""Greedy decoding with a model of `transformers`, the independent reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Continuation:
    tokens: list[int]
    logprobs: list[float]
    margin: float  # smallest lead of a chosen token over the next best, in logits


class Reference:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(  # comes in eval mode
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Returns [len(tokens), vocab] float32: row i is for the token after tokens[: i + 1]."""
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits.float().log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], max_new_tokens: int) -> Continuation:
        """Generates token by token, each from the logits of all tokens before it."""
        step, cache = torch.tensor([prompt]), None
        tokens, logprobs, margin = [], [], float("inf")
        for _ in range(max_new_tokens):
            output = self._model(step, past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[0, -1].float()
            best, second = logits.topk(2).values.tolist()
            token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))
            margin = min(margin, best - second)
            step = torch.tensor([[token]])
        return Continuation(tokens, logprobs, margin)
