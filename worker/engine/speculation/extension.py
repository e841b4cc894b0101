"""The pass of a draft layer over the rows of a step, after its sampling.

Each row has its hidden state of the model, and the token that follows it. So the layer's keys and values are those of all
tokens so far, and its results those from which drafts are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_router.worker.engine.runners.alias import alias
from mla_router.worker.engine.runners.capture import capture, capture_sizes
from mla_router.worker.engine.runners.decode_graph import DecodeGraph
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.speculation.drafter import DraftStep
from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.exchange import Exchange


class DraftLayer(Protocol):
    """One layer after the model, such as the first one of `MultiTokenPrediction`."""

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        """Returns the rows of the layer in a KV cache of `dtype`. Only the first spec is used."""
        ...

    def __call__(
        self, batch: ForwardBatch, hidden_states: Tensor, embedded: Tensor, caches: Sequence[Tensor]
    ) -> Tensor:
        """Returns the result of `MultiTokenPrediction.forward` for the first layer."""
        ...

    def serve(self, exchange: Exchange) -> None:
        """Does the part of a DP rank without rows in the `exchange` of a step."""
        ...


@dataclass(frozen=True, slots=True)
class ExtendGraph:
    """The captured pass of the layer over the rows of a decode graph. It reads the inputs and the result of that
    graph."""

    graph: torch.cuda.CUDAGraph
    following: Tensor  # [T] int64, input
    hidden_states: Tensor  # [T, hidden_size], output


class Extension:
    """Runs a draft layer over the rows of a step, by a CUDA graph if the step ran as one. `caches`: those of the
    layer."""

    def __init__(
        self, layer: DraftLayer, forward_pass: ForwardPass, caches: Sequence[Tensor]
    ) -> None:
        self._layer = layer
        self._forward = forward_pass
        self._caches = caches
        self._graphs: dict[DecodeGraph, ExtendGraph] = {}

    def __call__(self, step: DraftStep) -> Tensor:
        """Returns the hidden states [T, hidden_size] of the rows of a step. The next call overwrites them."""
        source, hidden_states = step.forward.source, step.forward.hidden_states
        if isinstance(source, DecodeGraph):
            graph = self._graphs[source]
            _write_following(step, source.looked_up.tokens, graph.following)
            graph.graph.replay()
            return graph.hidden_states
        if not step.plan.num_tokens:
            exchange = self._forward.exchange(step.plan)
            assert exchange is not None, f"a step without rows: {step.plan}"
            self._layer.serve(exchange)
            return hidden_states
        assert source is not None, f"rows that are not known: {step.plan}"
        following = torch.empty_like(source.tokens)
        _write_following(step, source.tokens, following)
        return self.run(source, hidden_states, following)

    def run(self, batch: ForwardBatch, hidden_states: Tensor, following: Tensor) -> Tensor:
        """Runs the layer over rows [T] of hidden states, and of the tokens after them."""
        embedded = self._forward.model.embed(following)
        extended: Tensor = self._layer(batch, hidden_states, embedded, self._caches)
        return extended

    def capture(self, decode_graphs: Sequence[DecodeGraph]) -> None:
        """Replaces all captured graphs by graphs for the steps of each of `decode_graphs`."""
        self._graphs = {}
        for queries in sorted({graph.queries for graph in decode_graphs}):
            by_size = {len(g.looked_up.slots): g for g in decode_graphs if g.queries == queries}
            captured = capture_sizes(
                "draft graph",
                partial(self._capture_size, by_size),
                [*by_size],
            )
            self._graphs |= {by_size[size]: graph for size, graph in captured.items()}

    def _capture_size(
        self, by_size: Mapping[int, DecodeGraph], size: int, pool: Any
    ) -> ExtendGraph:
        source = by_size[size]
        following = torch.zeros_like(source.looked_up.tokens)

        def extend() -> Tensor:
            batch = self._forward.decode_batch(source.looked_up, source.queries)
            return self.run(batch, source.output.hidden_states, following)

        graph, extended = capture(extend, pool, self._forward.device)
        return ExtendGraph(graph, following, alias(extended))


def _write_following(step: DraftStep, tokens: Tensor, following: Tensor) -> None:
    """Writes the token after each of T rows to `following` [T] int64. Rows of chunks, with `tokens` [T] int64, are
    followed by the next row's."""
    rows = step.forward.rows
    if rows is None:
        following[: len(step.tokens)].copy_(step.tokens)
        return
    following.copy_(tokens.roll(-1))
    following.index_copy_(0, rows, step.tokens)
