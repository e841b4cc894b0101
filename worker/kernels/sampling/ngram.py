"""Drafts by look-up: the tokens that followed the last tokens of a slot before (prompt lookup; n-grams as in SGLang's
NGRAM).

They are looked up in the slot's prediction, a text that the client expects as answer, and without one in the slot's own
tokens, prompt included. All of it stays on the device, so that the host launches steps before it knows their tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_router.worker.kernels.pdl import launch_options, wait_for_previous

MAX_MATCH = 8  # maximum number of tokens that are compared
# Least equal tokens: a single one is often followed by another token than before, but a prediction is meant to be used
MIN_MATCH, MIN_PREDICTED_MATCH = 2, 1
_SCALE = 1 << 24  # more than the positions of a text
_BLOCK = 1024


def draft_ngrams(
    tokens: Tensor,
    slots: Tensor,
    last: Tensor | None,
    lengths: Tensor,
    starts: Tensor,
    predicted: Tensor,
    text: Tensor,
    drafts: Tensor,
    *,
    decodes: int,
    rows: int,
    history: int,
) -> None:
    """Appends the tokens of a step to the texts of its slots, and drafts the tokens after them.

    `tokens` [R] int64: of the sampled rows, `rows` of each of the first `decodes` slots, then one a slot. `slots` [S]
    int64. `last` [S] int64: the row of each slot's last token; None: R == S. By slot, [all slots] int32: `lengths`, its
    tokens after the step; `starts`, those of its prompt; `predicted`, those of its prediction, 0 without one. `text`
    [all slots, W] int32: the slot's own tokens, and from column `history` on its prediction. `drafts` [all slots, K]
    int64 is written.

    The longest run of up to MAX_MATCH equal tokens decides, in a prediction the first such run, in own tokens the last.
    The start of an answer matches the start of its prediction. Without a run, a prediction goes on where the answer
    would be if all of it were right.
    """
    op = draft_ngrams_triton if tokens.is_cuda else draft_ngrams_torch
    op(
        tokens,
        slots,
        last,
        lengths,
        starts,
        predicted,
        text,
        drafts,
        decodes=decodes,
        rows=rows,
        history=history,
    )


def draft_ngrams_torch(
    tokens: Tensor,
    slots: Tensor,
    last: Tensor | None,
    lengths: Tensor,
    starts: Tensor,
    predicted: Tensor,
    text: Tensor,
    drafts: Tensor,
    *,
    decodes: int,
    rows: int,
    history: int,
) -> None:
    ranks = torch.arange(drafts.shape[1])
    for at, slot in enumerate(slots.tolist()):
        first = at * rows if at < decodes else decodes * (rows - 1) + at
        gained = 1 if last is None else int(last[at]) - first + 1
        length, start, count = int(lengths[slot]), int(starts[slot]), int(predicted[slot])
        text[slot, length - gained : length] = tokens[first : first + gained].int()
        source = text[slot, history : history + count] if count else text[slot, :length]
        candidates = torch.arange(len(source))  # of the first draft
        run, score = torch.ones(len(source), dtype=torch.bool), torch.zeros_like(candidates)
        for back in range(1, 1 + min(MAX_MATCH, length)):
            inside = candidates >= back
            same = inside & (source[(candidates - back).clamp_min(0)] == text[slot, length - back])
            run &= ~inside if count and length - back < start else same
            score += run
        order = len(source) - candidates if count else candidates
        best = int((score * _SCALE + order).argmax())
        if score[best] < (MIN_PREDICTED_MATCH if count else MIN_MATCH):
            best = min(length - start, count - 1) if count else 0
        drafts[slot] = source[best + ranks % (len(source) - best)].long()


def draft_ngrams_triton(
    tokens: Tensor,
    slots: Tensor,
    last: Tensor | None,
    lengths: Tensor,
    starts: Tensor,
    predicted: Tensor,
    text: Tensor,
    drafts: Tensor,
    *,
    decodes: int,
    rows: int,
    history: int,
) -> None:
    count = len(slots)
    assert len(tokens) == decodes * rows + count - decodes, (
        f"{len(tokens)} tokens of {count} slots, {decodes} with {rows} rows"
    )
    assert text.stride(1) == drafts.stride(1) == 1 and text.shape[1] < _SCALE, f"{text.shape}"
    most = drafts.shape[1]
    _draft_kernel[(count,)](
        tokens,
        slots,
        slots if last is None else last,
        lengths,
        starts,
        predicted,
        text,
        drafts,
        decodes,
        history,
        text.stride(0),
        drafts.stride(0),
        ROWS=rows,
        HAS_LAST=last is not None,
        DRAFTS=most,
        WIDTH=triton.next_power_of_2(max(rows, most)),
        COMPARED=MAX_MATCH,
        LEAST_OWN=MIN_MATCH,
        LEAST_PREDICTED=MIN_PREDICTED_MATCH,
        SCALE=_SCALE,
        BLOCK=_BLOCK,
        **launch_options(),
    )


@triton.jit(
    do_not_specialize=["decodes", "history", "text_stride", "draft_stride"],
    do_not_specialize_on_alignment=["tokens", "slots", "last"],
)
def _draft_kernel(
    tokens,
    slots,
    last,
    lengths,
    starts,
    predicted,
    text,
    drafts,
    decodes,
    history,
    text_stride,
    draft_stride,
    ROWS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPARED: tl.constexpr,
    LEAST_OWN: tl.constexpr,
    LEAST_PREDICTED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    at = tl.program_id(0)
    slot = tl.load(slots + at)
    first = tl.where(at < decodes, at * ROWS, decodes * (ROWS - 1) + at)
    gained = 1
    if HAS_LAST:
        gained = (tl.load(last + at) - first + 1).to(tl.int32)
    length, start = tl.load(lengths + slot), tl.load(starts + slot)
    count = tl.load(predicted + slot)
    own = text + slot * text_stride
    rank = tl.arange(0, WIDTH)
    new = tl.load(tokens + first + rank, rank < gained, other=0).to(tl.int32)
    tl.store(own + length - gained + rank, new, rank < gained)
    tl.debug_barrier()  # other threads of this program read them
    is_predicted = count > 0
    source = own + tl.where(is_predicted, history, 0)
    size = tl.where(is_predicted, count, length)
    best = -1
    for begin in range(0, size, BLOCK):
        candidate = begin + tl.arange(0, BLOCK)
        run = candidate < size
        score = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(1, COMPARED + 1):
            mine = tl.load(own + length - back, length >= back, other=-1)
            inside = candidate >= back
            token = tl.load(source + candidate - back, inside & (candidate < size), other=-2)
            begins = is_predicted & (length - back < start)
            run = run & ((begins & (candidate < back)) | ((begins == 0) & (token == mine)))
            score += run.to(tl.int32)
        order = tl.where(is_predicted, size - candidate, candidate)
        best = tl.maximum(best, tl.max(tl.where(candidate < size, score * SCALE + order, -1), 0))
    score, order = best // SCALE, best % SCALE
    found = tl.where(is_predicted, size - order, order)
    least = tl.where(is_predicted, LEAST_PREDICTED, LEAST_OWN)
    otherwise = tl.where(is_predicted, tl.minimum(length - start, count - 1), 0)
    found = tl.where(score >= least, found, otherwise)
    draft = tl.load(source + found + rank % (size - found), rank < DRAFTS, other=0)
    tl.store(drafts + slot * draft_stride + rank, draft.to(tl.int64), rank < DRAFTS)
