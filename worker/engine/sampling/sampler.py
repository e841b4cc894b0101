"""Samples a token for each sampled row of a step, with its logprobs, without waiting for the device.

The logits of a row go through, in this order: the request's allowed tokens; the grammar's token bitmask; logit_bias and
min_tokens; repetition, frequency and presence penalty; temperature; top_k, top_p and min_p. Greedy rows skip the last
four. Each step before the temperature runs for the rows that use it only. Bitmasks come first because the logprobs are
computed after them: a masked token stays masked, for any number that is added to its logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import Admitted, StepPlan, TokenMasks
from mla_router.worker.engine.sampling.allowed import AllowedTokens
from mla_router.worker.engine.sampling.bias import LogitBias
from mla_router.worker.engine.sampling.bitmask import apply_token_bitmask
from mla_router.worker.engine.sampling.drafted_rows import DraftedRows
from mla_router.worker.engine.sampling.draws import Draws
from mla_router.worker.engine.sampling.features import SlotFeatures
from mla_router.worker.engine.sampling.logprobs import RowLogprobs, Run, token_logprobs
from mla_router.worker.engine.sampling.params import SlotSamplingParams
from mla_router.worker.engine.sampling.penalties import TokenCounts
from mla_router.worker.engine.sampling.rows import SampledRows
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.kv_cache.tree_rows import Trees
from mla_router.worker.kernels.sampling.sample import sample
from mla_router.worker.kernels.sampling.top_threshold import top_threshold

# Most rows that are changed at a time, which limits temporary memory.
_SLICE_ROWS = 256


class Sampled(NamedTuple):
    """What `Sampler.sample` returns for R rows of S slots."""

    logprobs: RowLogprobs | None
    # With drafts: tokens of the rows, 0 for a row without a token, [R] int64; and the row of each slot's last token, [S] int64
    tokens: Tensor | None = None
    last: Tensor | None = None
    path: Tensor | None = None  # with a tree: the accepted nodes of each slot, as of `accept_tree`


class Sampler:
    """Samples tokens, with the sampling state of all slots."""

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, num_drafts: int = 0
    ) -> None:
        self.features = SlotFeatures(num_slots, num_drafts)
        self._params = SlotSamplingParams(num_slots + 1, device)  # with the idle slot
        self._counts = TokenCounts(num_slots, vocab_size, device)
        self._bias = LogitBias(num_slots, device)
        self._allowed = AllowedTokens(num_slots, vocab_size, device)
        self._upload = Upload(device)

    @property
    def penalty_bytes(self) -> int:
        """Bytes of device memory for the token counts of penalties."""
        return self._counts.nbytes

    def draws(self, slots: Tensor, positions: Tensor) -> Draws:
        """Returns the draws of rows of `slots` [R] int64, from `positions` [R] int32 on."""
        return Draws(self._params, slots, positions)

    def admit(self, requests: tuple[Admitted, ...]) -> None:
        """Writes the sampling state of requests that take a slot."""
        if not requests:
            return
        self.features.admit(requests)
        self._params.admit(requests)
        if penalized := [r for r in requests if r.sampling.penalized]:
            self._counts.admit(penalized)
        if biased := [r for r in requests if r.sampling.logit_bias or r.sampling.min_tokens]:
            self._bias.admit(biased)
        if restricted := [r for r in requests if r.sampling.allowed]:
            self._allowed.admit(restricted)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        plan: StepPlan,
        masks: TokenMasks | None,
        *,
        lengths: Tensor,
        last_token: Tensor,
        drafts: Tensor,
        out: Tensor,
        trees: Trees | None = None,
    ) -> Sampled:
        """Samples the tokens of `plan` for R rows of S slots, and their logprobs, if requested.

        `logits` [R, V] float32 are overwritten. `slots` [S] int64. By slot: `lengths` int32, its tokens, which the step
        increases by those that it samples; `last_token` int64, which it replaces (0 for a row without a token); `drafts`
        [num_slots, K] int64, which it verifies: a chain, or the nodes of `trees` if plan.tree_nodes is not 0. Writes the
        tokens to `out` [S, 1 + plan.num_drafts] int32, as `accept` does; NO_TOKEN for a row without a token.
        """
        features = self.features.of(plan)
        sampled_rows = SampledRows(plan)
        of_tree = plan.tree_nodes > 0
        of_paths = sampled_rows.on_paths(features.with_logprobs) if of_tree else []
        masked_slots = np.array(masks.rows if masks else (), dtype=np.int64)
        mask_counts = np.array(masks.counts_of_rows if masks else (), dtype=np.int64)
        cuts_drafts = plan.num_drafts > 0 and masks is not None
        penalized, biased, restricted, with_logprobs, masked, bits, *of_drafts = self._upload(
            [
                sampled_rows.all(features.penalized),
                sampled_rows.all(features.biased),
                sampled_rows.all(features.restricted),
                sampled_rows.all(features.with_logprobs),
                sampled_rows.leading(masked_slots, mask_counts),
                masks.bits if masks else np.zeros((0, 0), dtype=np.int32),
                *sampled_rows.arrays(),
                *([features.penalized] if plan.num_drafts else []),
                *([sampled_rows.room(masked_slots, mask_counts)] if cuts_drafts else []),
                *of_paths,
            ]
        )
        owners, drafted, path, limits = slots, None, None, None
        if of_drafts:
            slots, numbers, bounds, penalized_owners, *on_paths = of_drafts
            if cuts_drafts:
                room, *on_paths = on_paths
                if of_tree:  # its first rows are the chain of its best nodes
                    limits = room
                else:
                    bounds = torch.minimum(bounds, lengths[owners[: len(bounds)]] + room - 1)
            drafted = DraftedRows.of(plan, slots, numbers, bounds, drafts, trees, limits)
            positions = lengths[slots] + drafted.offsets  # [R]
        for rows in _slices(restricted):
            _put(
                logits, rows, apply_token_bitmask(_get(logits, rows), self._allowed.of(slots[rows]))
            )
        for rows, some_bits in zip(_slices(masked), torch.split(bits, _SLICE_ROWS), strict=False):
            _put(logits, rows, apply_token_bitmask(_get(logits, rows), some_bits))
        # Logprobs are of the masked logits, before biases and penalties
        own = logits.index_select(0, with_logprobs) if len(with_logprobs) else None
        for rows in _slices(biased):
            of = slots[rows]
            at = lengths[of] if drafted is None else positions[rows]
            _put(logits, rows, self._bias.add(_get(logits, rows), of, at))
        for rows in _slices(penalized):
            of, params = slots[rows], self._params.of(slots[rows])
            ahead = None if drafted is None else drafted.ahead(rows)
            _put(logits, rows, self._counts.penalize(_get(logits, rows), of, params, ahead))

        threshold = None
        if features.filtered:
            params = self._params.of(slots)
            threshold = top_threshold(
                logits,
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
            )
        if drafted is not None:
            draws = self.draws(slots, positions)
            draws.draw(logits, threshold)
            last, path = drafted.accept(draws.drawn, owners, lengths, last_token, out)
            sampled = Sampled(None, draws.tokens, last, path)
            if len(penalized):
                of, rows = owners[penalized_owners], last[penalized_owners]
                self._counts.add(of, last_token[of], drafted.ahead(rows))
        else:
            temperature, seed = self._params.temperature, self._params.seed
            sample(logits, slots, lengths, temperature, seed, threshold, last_token, out[:, 0])
            sampled = Sampled(None)
            if len(penalized):
                of = slots[penalized]
                self._counts.add(of, last_token[of])
        if own is None:
            return sampled
        runs = [
            Run(owner, sampled_rows.count(owner), top)
            for owner, top in zip(
                features.with_logprobs.tolist(), features.num_top.tolist(), strict=True
            )
        ]
        tokens = last_token[slots] if sampled.tokens is None else sampled.tokens
        tokens = tokens[with_logprobs]
        if path is not None:
            nodes, firsts = on_paths
            taken = firsts + path.flatten()[nodes].clamp_min(0)
            own, tokens = own[taken], tokens[taken]
        logprobs = token_logprobs(own, tokens, runs)
        return sampled._replace(logprobs=logprobs)


def _slices(rows: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(rows, _SLICE_ROWS) if len(rows) else ())


# `rows` are distinct and ascending: if there are as many as logits, they are all rows in order, without a copy.


def _get(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _put(logits: Tensor, rows: Tensor, values: Tensor) -> None:
    if values is not logits:
        logits.index_copy_(0, rows, values)
