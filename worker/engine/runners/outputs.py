"""How far a runner takes the rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mla_router.worker.engine.sampling.logprobs import RowLogprobs
from mla_router.worker.kernels.kv_cache.locations import LookedUp


class LayerOutput(NamedTuple):
    """T rows behind the attention of the last layer (`Decoder.run_layers`). `engine/head.py` computes the rest."""

    hidden_states: Tensor  # [T, hidden_size], not yet added to the residual
    residual: Tensor  # [T, hidden_size]


class HeadOutput(NamedTuple):
    """N rows behind the head."""

    hidden_states: Tensor  # [N, hidden_size], normalized: the head's input
    logits: Tensor  # [N, vocab_size] float32


# The forward pass of decode rows that were looked up.
Decode = Callable[[LookedUp], HeadOutput]


class StepLogits(NamedTuple):
    """A whole forward pass: logits of R sampled rows, and their places."""

    logits: Tensor  # [R, vocab_size] float32; sampling writes over them
    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64, of the tokens about to be sampled
    # [N, hidden_size], the head's input: all rows of a decode graph, padding included; else the sampled rows, then
    # those with logprobs of prompt tokens
    hidden_states: Tensor
    prompt_logprobs: RowLogprobs | None = None
