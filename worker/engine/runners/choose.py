"""The choice of a step's runner, from host integers alone.

Ranks that share a model have to agree on it, so that it reads neither a device nor a runner's state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.runners.sizes import GraphSizes

# Prompt tokens of a step that runs as decode rows. With more of them the device is busy for longer, so that a
# graph saves less, and each is one more row with attention of its own.
MAX_INPUT_TOKENS = 64
# Rows of the KV cache that such a step reads in addition, because each token of a chunk reads the whole request and a
# chunk's own attention reads it once: in each layer 75 MB of V2-Lite's latents.
MAX_EXTRA_READS = 1 << 16


class RunnerKind(Enum):
    EAGER = "eager"  # kernel by kernel: steps of any kind and size
    DECODE_GRAPH = "decode graph"  # decode rows, and few prompt tokens, as one graph
    PREFILL_GRAPH = "prefill graph"  # one prompt without a cached prefix, as one graph
    PIECEWISE = "piecewise"  # any step, as one graph a layer beside its attention


class RunnerChoice(NamedTuple):
    kind: RunnerKind
    rows: int  # of the step, padding included


def choose_runner(plan: StepPlan, sizes: GraphSizes) -> RunnerChoice:
    """The first kind that fits `plan` and has a graph of at least as many rows in `sizes`, which are those captured."""
    rows = plan.num_tokens
    # Before prefill graphs: few rows take less time as decode rows than in the attention of prompts
    if (size := _smallest(sizes.decode, rows)) and fits_decode_graph(plan):
        return RunnerChoice(RunnerKind.DECODE_GRAPH, size)
    if (size := _smallest(sizes.prefill, rows)) and fits_prefill_graph(plan):
        return RunnerChoice(RunnerKind.PREFILL_GRAPH, size)
    if size := _smallest(sizes.piecewise, rows):
        return RunnerChoice(RunnerKind.PIECEWISE, size)
    return RunnerChoice(RunnerKind.EAGER, rows)


def fits_decode_graph(plan: StepPlan) -> bool:
    """Whether all rows can be decode rows at little cost. Steps with logprobs of prompt tokens do not fit: their
    logits are computed a slice at a time, outside of a graph."""
    tokens = extra_reads = 0
    for chunk in plan.chunks:
        if chunk.logprob_tokens:
            return False
        tokens += len(chunk.tokens)
        extra_reads += (len(chunk.tokens) - 1) * (chunk.start + len(chunk.tokens))
    return plan.num_tokens > 0 and tokens <= MAX_INPUT_TOKENS and extra_reads <= MAX_EXTRA_READS


def fits_prefill_graph(plan: StepPlan) -> bool:
    """Whether the step is one chunk that begins its request."""
    return not plan.decode_slots and len(plan.chunks) == 1 and not plan.chunks[0].start


def _smallest(sizes: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `sizes` that is at least `rows`, or 0."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else 0
