"""Selects the runner of a step from host integers alone.

Ranks that share a model must agree on the runner, so the choice depends on neither a device nor the state of a runner.
With DP attention the ranks have different plans: the choice depends on `StepPlan.group` alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.step.plan import StepPlan

# Maximum number of prompt tokens of a step that runs as decode rows. A graph saves less in longer steps, and each token
# is a row with separate attention.
MAX_INPUT_TOKENS = 64
# Maximum number of additional KV cache rows that such a step reads: each token of a chunk reads the whole request,
# which the attention of the chunk would read once. In each layer of V2-Lite this is 75 MB of latents.
MAX_EXTRA_READS = 1 << 16
# Maximum padding of all DP ranks in a piecewise graph. Each layer of experts exchanges it as if it were rows: 2048 of
# V3 are 29 MB in each direction. Steps with more are long on some rank, which hides the launches of separate kernels.
MAX_PADDING = 2048


class RunnerKind(Enum):
    """The ways to launch a step."""

    EAGER = "eager"  # kernel by kernel: steps of any kind and size
    DECODE_GRAPH = "decode graph"  # decode rows and few prompt tokens, as one graph
    VERIFY_GRAPH = "verify graph"  # decode rows, equally many of each slot, as one graph
    PREFILL_GRAPH = "prefill graph"  # one prompt of text without a cached prefix, as one graph
    PIECEWISE = "piecewise"  # any step, as graphs between the attention of the layers


class RunnerChoice(NamedTuple):
    """The runner of a step, and the size of its graph."""

    kind: RunnerKind
    rows: int  # padding included


def choose_runner(plan: StepPlan, sizes: GraphSizes) -> RunnerChoice:
    """Returns the first runner that fits `plan` and has a graph with enough rows. `sizes`: the captured graphs. With a
    group, all its ranks get the same runner, or graphs of decode rows with and without drafts. Graphs have the size for
    the rank with the most rows."""
    group = plan.group
    rows = plan.num_tokens if group is None else max(group.rows)
    decode = fits_decode_graph(plan) if group is None else group.decode
    verifies = plan.num_drafts and not plan.chunks
    if group is None and verifies and (size := smallest(sizes.verify, rows)):
        return RunnerChoice(RunnerKind.VERIFY_GRAPH, size)
    # Before prefill graphs, because few rows are faster as decode rows than in prefill attention
    if rows and decode and (size := smallest(sizes.decode, rows)):
        # Graphs of one size exchange equally many rows, so ranks with and without drafts run together
        of_rank = verifies and size in sizes.verify
        return RunnerChoice(RunnerKind.VERIFY_GRAPH if of_rank else RunnerKind.DECODE_GRAPH, size)
    # The other ranks of a group have other chunks
    if group is None and fits_prefill_graph(plan) and (size := smallest(sizes.prefill, rows)):
        return RunnerChoice(RunnerKind.PREFILL_GRAPH, size)
    size = smallest(sizes.piecewise, rows)
    padding = 0 if group is None else size * len(group.rows) - sum(group.rows)
    if size and padding <= MAX_PADDING:
        return RunnerChoice(RunnerKind.PIECEWISE, size)
    return RunnerChoice(RunnerKind.EAGER, plan.num_tokens)


def fits_decode_graph(plan: StepPlan) -> bool:
    """Returns whether all rows, if any, can be decode rows at little cost. Steps with logprobs of prompt tokens do not
    fit: their logits are computed a slice at a time, outside of a graph."""
    if plan.tree_nodes:  # the rows of such a graph attend to all tokens before them
        return False
    if plan.has_images:  # the graph takes the embeddings of its tokens
        return False
    tokens = extra_reads = 0
    for chunk in plan.chunks:
        if chunk.logprob_tokens:
            return False
        tokens += len(chunk.tokens)
        extra_reads += (len(chunk.tokens) - 1) * (chunk.start + len(chunk.tokens))
    return tokens <= MAX_INPUT_TOKENS and extra_reads <= MAX_EXTRA_READS


def fits_prefill_graph(plan: StepPlan) -> bool:
    """Returns whether the step is one chunk of text without a cached prefix."""
    if plan.decode_slots or len(plan.chunks) != 1:
        return False
    chunk = plan.chunks[0]
    return not chunk.start and not chunk.images


def smallest(sizes: Sequence[int], rows: int) -> int:
    """Returns the smallest of the ascending `sizes` that is at least `rows`, or 0."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else 0
