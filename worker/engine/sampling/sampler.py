"""Samples a token for each sampled row of a step, with its logprobs, without waiting for the device.

The logits of a row go through, in this order: the request's allowed tokens; the grammar's token bitmask; logit_bias and
min_tokens; repetition, frequency and presence penalty; temperature; top_k, top_p and min_p. Greedy rows skip the last
four. Each step before the temperature runs only for the rows that use it. Bitmasks come first because the logprobs are
computed after them: a masked token stays masked, for any number that is added to its logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.engine.sampling.allowed import AllowedTokens
from mla_router.worker.engine.sampling.bias import LogitBias
from mla_router.worker.engine.sampling.bitmask import apply_token_bitmask
from mla_router.worker.engine.sampling.drafted_rows import DraftedRows, SlotTokens
from mla_router.worker.engine.sampling.draws import Draws
from mla_router.worker.engine.sampling.features import RowFeatures, SlotFeatures
from mla_router.worker.engine.sampling.logprobs import RowLogprobs, Run, token_logprobs
from mla_router.worker.engine.sampling.params import SlotSamplingParams
from mla_router.worker.engine.sampling.penalties import TokenCounts
from mla_router.worker.engine.sampling.rows import SampledRows
from mla_router.worker.engine.sampling.step_rows import StepRows
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.sampling.sample import sample
from mla_router.worker.kernels.sampling.top_threshold import top_threshold
from mla_router.worker.step.plan import Admitted, StepPlan, TokenMasks

# Maximum number of rows that are changed at a time, which limits temporary memory.
_SLICE_ROWS = 256


class Sampled(NamedTuple):
    """The result of `Sampler.sample` for R rows of S slots."""

    logprobs: RowLogprobs | None
    # With drafts: tokens of the rows, 0 for a row without a token, [R] int64; and the row of each slot's last token,
    # [S] int64
    tokens: Tensor | None = None
    last: Tensor | None = None
    path: Tensor | None = None  # with a tree: the accepted nodes of each slot (`accept_tree`)


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
        tokens: SlotTokens,
        out: Tensor,
    ) -> Sampled:
        """Samples the tokens of `plan` for R rows of S slots, and their logprobs, if requested.

        `logits` [R, V] float32 are overwritten. `slots` [S] int64. `tokens`: lengths increase by the sampled tokens, last
        tokens are replaced (by 0 for a row without a token), and the drafts are verified. Writes the tokens to `out`
        [S, 1 + plan.num_drafts] int32, as `accept` does; NO_TOKEN for a row without a token.
        """
        features = self.features.of(plan)
        rows = StepRows.upload(self._upload, plan, features, masks)
        drafted = None
        if rows.drafts is not None:
            drafted = DraftedRows.of(plan, slots, rows.drafts, tokens)
        row_slots = slots if drafted is None else drafted.slots
        self._mask(logits, rows, row_slots)
        # Logprobs are of the masked logits, before biases and penalties
        masked = logits.index_select(0, rows.with_logprobs) if len(rows.with_logprobs) else None
        self._add_biases(logits, rows, row_slots, tokens, drafted)
        self._penalize(logits, rows, row_slots, drafted)
        threshold = self._threshold(logits, row_slots) if features.filtered else None
        if drafted is None:
            sampled = self._draw(logits, slots, rows, tokens, threshold, out)
        else:
            sampled = self._verify(logits, slots, drafted, rows, tokens, threshold, out)
        if masked is None:
            return sampled
        drawn = tokens.last_token[slots] if sampled.tokens is None else sampled.tokens
        return sampled._replace(
            logprobs=self._logprobs(masked, drawn, plan, features, rows, sampled)
        )

    def _mask(self, logits: Tensor, rows: StepRows, slots: Tensor) -> None:
        """Excludes tokens by `SamplingParams.allowed` and by the grammars' bitmasks."""
        for part in _slices(rows.restricted):
            allowed = self._allowed.of(slots[part])
            _put(logits, part, apply_token_bitmask(_get(logits, part), allowed))
        bits = torch.split(rows.bits, _SLICE_ROWS)
        for part, part_bits in zip(_slices(rows.masked), bits, strict=False):
            _put(logits, part, apply_token_bitmask(_get(logits, part), part_bits))

    def _add_biases(
        self,
        logits: Tensor,
        rows: StepRows,
        slots: Tensor,
        tokens: SlotTokens,
        drafted: DraftedRows | None,
    ) -> None:
        for part in _slices(rows.biased):
            part_slots = slots[part]
            at = tokens.lengths[part_slots] if drafted is None else drafted.positions[part]
            _put(logits, part, self._bias.add(_get(logits, part), part_slots, at))

    def _penalize(
        self, logits: Tensor, rows: StepRows, slots: Tensor, drafted: DraftedRows | None
    ) -> None:
        for part in _slices(rows.penalized):
            part_slots = slots[part]
            params = self._params.of(part_slots)
            ahead = None if drafted is None else drafted.ahead(part)
            penalized = self._counts.penalize(_get(logits, part), part_slots, params, ahead)
            _put(logits, part, penalized)

    def _threshold(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Returns the least logit of each row that top_k, top_p and min_p leave."""
        params = self._params.of(slots)
        return top_threshold(logits, params.temperature, params.top_k, params.top_p, params.min_p)

    def _draw(
        self,
        logits: Tensor,
        slots: Tensor,
        rows: StepRows,
        tokens: SlotTokens,
        threshold: Tensor | None,
        out: Tensor,
    ) -> Sampled:
        """Draws one token for each slot."""
        lengths, last_token = tokens.lengths, tokens.last_token
        temperature, seed = self._params.temperature, self._params.seed
        sample(logits, slots, lengths, temperature, seed, threshold, last_token, out[:, 0])
        if len(rows.penalized):
            penalized = slots[rows.penalized]
            self._counts.add(penalized, last_token[penalized])
        return Sampled(None)

    def _verify(
        self,
        logits: Tensor,
        slots: Tensor,
        drafted: DraftedRows,
        rows: StepRows,
        tokens: SlotTokens,
        threshold: Tensor | None,
        out: Tensor,
    ) -> Sampled:
        """Draws a token for each row, and accepts the drafts that agree with it."""
        assert rows.drafts is not None
        draws = self.draws(drafted.slots, drafted.positions)
        draws.draw(logits, threshold)
        last, path = drafted.accept(draws.drawn, slots, tokens, out)
        if len(rows.penalized):
            penalized, last_rows = slots[rows.drafts.penalized], last[rows.drafts.penalized]
            self._counts.add(penalized, tokens.last_token[penalized], drafted.ahead(last_rows))
        return Sampled(None, draws.tokens, last, path)

    def _logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        plan: StepPlan,
        features: RowFeatures,
        rows: StepRows,
        sampled: Sampled,
    ) -> RowLogprobs:
        """Returns the logprobs of `tokens` [R] in `logits` [rows with logprobs, V]; of a tree, only in the rows of
        accepted nodes."""
        tokens = tokens[rows.with_logprobs]
        if sampled.path is not None:
            drafts = rows.drafts
            assert drafts is not None and drafts.nodes is not None and drafts.firsts is not None
            taken = drafts.firsts + sampled.path.flatten()[drafts.nodes].clamp_min(0)
            logits, tokens = logits[taken], tokens[taken]
        counts = SampledRows(plan)
        runs = [
            Run(owner, counts.count(owner), top)
            for owner, top in zip(
                features.with_logprobs.tolist(), features.num_top.tolist(), strict=True
            )
        ]
        return token_logprobs(logits, tokens, runs)


def _slices(rows: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(rows, _SLICE_ROWS) if len(rows) else ())


# `rows` are distinct and ascending: if there are as many as logits, they are all rows in order, without a copy.


def _get(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _put(logits: Tensor, rows: Tensor, values: Tensor) -> None:
    if values is not logits:
        logits.index_copy_(0, rows, values)
