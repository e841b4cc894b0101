"""Runs a model on `ForwardBatch`es as the engine does, with simple bookkeeping in Python.

Pages are allocated in random order, and unwritten memory is NaN, so that a kernel which reads a wrong row is detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent, StepLayout
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.kv_cache.pool import KVCachePool
from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.causal_lm import CausalLM
from support.attention import torch_attention


def nan_caches(
    specs: Sequence[KVCacheSpec], pages: int, page_size: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns the caches of a pool, filled with NaN."""
    caches = KVCachePool(specs, pages, page_size, device).layers
    for cache in caches:
        cache.fill_(float("nan"))
    return caches


class ForwardDriver:
    def __init__(
        self,
        model: CausalLM,
        *,
        page_size: int,
        num_slots: int = 4,
        max_length: int = 320,
        seed: int = 0,
        attention: ModelAttention | None = None,
    ) -> None:
        self.attention = attention or torch_attention(model.config)
        self.model = model
        self.page_size = page_size
        self.lengths = [0] * num_slots  # tokens in the cache
        per_slot = -(-max_length // page_size)
        shuffle = torch.Generator().manual_seed(seed)
        pages = torch.randperm(num_slots * per_slot, generator=shuffle) + 1
        self.page_table = pages.to(torch.int32).view(num_slots, per_slot)
        weight = model.head.values
        self.device = weight.device
        specs = model.config.kv_cache_specs(weight.dtype)
        self.caches = nan_caches(specs, len(pages), page_size, self.device)

    def share(self, owner: int, slot: int, pages: int) -> int:
        """Starts the empty `slot` with the first `pages` pages of `owner`, as after a hit in the
        prefix cache. Returns its number of tokens."""
        assert self.lengths[slot] == 0 and pages * self.page_size <= self.lengths[owner]
        self.page_table[slot, :pages] = self.page_table[owner, :pages]
        self.lengths[slot] = pages * self.page_size
        return self.lengths[slot]

    def step(
        self,
        decodes: Mapping[int, int] | None = None,
        chunks: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> Tensor:
        """Returns the log-probabilities [T, vocab] after each token of `batch`."""
        hidden = self.model(self.batch(decodes, chunks), self.caches)
        return self.model.logits(hidden).log_softmax(dim=-1)

    def batch(
        self,
        decodes: Mapping[int, int] | None = None,
        chunks: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> ForwardBatch:
        """Returns the next step: one token of each slot in `decodes`, then the (slot, tokens) in `chunks`."""
        decodes = decodes or {}
        runs = [(slot, [token]) for slot, token in decodes.items()]
        runs += [(slot, list(tokens)) for slot, tokens in chunks]
        tokens, positions, locations = [], [], []
        for slot, run in runs:
            for token in run:
                position = self.lengths[slot]
                page = int(self.page_table[slot, position // self.page_size])
                tokens.append(token)
                positions.append(position)
                locations.append(page * self.page_size + position % self.page_size)
                self.lengths[slot] += 1
        decode_lengths = [self.lengths[slot] for slot in decodes]
        at = self.device
        layout = StepLayout(
            page_table=self.page_table.to(at),
            page_size=self.page_size,
            decode_slots=torch.tensor(list(decodes), dtype=torch.int64, device=at),
            decode_lengths=torch.tensor(decode_lengths, dtype=torch.int32, device=at),
            max_decode_length=max(decode_lengths, default=0),
            chunks=tuple(
                ChunkExtent(slot, self.lengths[slot] - len(run), len(run)) for slot, run in chunks
            ),
        )
        return ForwardBatch(
            tokens=torch.tensor(tokens, device=at),
            positions=torch.tensor(positions, device=at),
            out_cache_loc=torch.tensor(locations, device=at),
            num_decodes=len(decodes),
            attention=self.attention.plan(layout),
        )
