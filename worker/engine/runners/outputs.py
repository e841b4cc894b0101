"""Outputs of the runners, at three stages of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mla_router.worker.engine.sampling.logprobs import RowLogprobs
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.step.plan import StepPlan

if TYPE_CHECKING:
    from mla_router.worker.engine.runners.decode_graph import DecodeGraph


class LayerOutput(NamedTuple):
    """T rows after the attention of the last layer (`Decoder.run_layers`). `engine/head.py` computes the rest."""

    hidden_states: Tensor  # [T, hidden_size], not added to the residual yet
    residual: Tensor  # [T, hidden_size]
    batch: ForwardBatch | None = None  # the rows, for a drafter; None: not known


class HeadOutput(NamedTuple):
    """N rows after the language model's head."""

    hidden_states: Tensor  # [N, hidden_size], normalized: the input of the head
    logits: Tensor  # [N, vocab_size] float32


# The forward pass of decode rows, after their state was looked up.
Decode = Callable[[LookedUp], HeadOutput]


class ForwardOutput(NamedTuple):
    """A launched forward pass, for R sampled rows of S slots. R == S without drafts."""

    plan: StepPlan
    logits: Tensor  # [R, vocab_size] float32; sampling overwrites them
    slots: Tensor  # [S] int64
    # [N, hidden_size], the input of the head: all rows of a decode graph, padding included; with a drafter all rows;
    # otherwise the sampled rows, then the prompt rows with logprobs
    hidden_states: Tensor
    prompt_logprobs: RowLogprobs | None = None
    rows: Tensor | None = None  # [R] int64, the sampled rows; None: the first ones
    source: ForwardBatch | DecodeGraph | None = None  # of the rows, for a drafter; None: not known
    began: float = 0.0  # time at which the launch of the step began, of `time.perf_counter`
