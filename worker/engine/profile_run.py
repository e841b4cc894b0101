"""The steps of the profile run: those that need most memory, and more until every kernel of a step is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan

# All features of sampling that take memory.
_ALL_FEATURES = SamplingParams(
    max_tokens=2,
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=True,
    top_logprobs=20,
)
_GREEDY = SamplingParams(max_tokens=2)  # sampled by a separate kernel

SHORT_CHUNK = 16  # short chunks have separate kernels
# Numbers of decode rows, and of tokens of the chunk beside them: few of either have separate kernels.
FEW_ROWS = (
    (1, 1),
    (4, 8),
    (16, SHORT_CHUNK),
    (32, SHORT_CHUNK),
    (64, SHORT_CHUNK),
    (160, SHORT_CHUNK),
)
# Short chunks in one step, so that the attention of their queries has more programs than a GPU can run at a time.
MANY_CHUNKS = 40


def profile_plans(capacity: Capacity, prefill_tokens: int, max_keys: int) -> list[StepPlan]:
    """Returns the steps. If possible, chunks have cached prefixes so long that their keys exceed `max_keys`
    (`AttentionBackend`)."""
    context, slots = capacity.context_length, capacity.num_slots

    def after_prefixes(sampling: SamplingParams, length: int, chunks: int) -> StepPlan:
        prefix = min(context - length, max_keys // chunks + 1)
        return _mixed_plan(capacity, sampling, [length] * chunks, prefix)

    whole = [context] * (prefill_tokens // context) + [prefill_tokens % context]
    whole = [length for length in whole if length][:slots]
    several = min(-(-(max_keys + 1) // context), slots, prefill_tokens)
    each = min(prefill_tokens // several, context)
    short = min(SHORT_CHUNK, each)
    many = min(MANY_CHUNKS, slots, prefill_tokens // short)
    return [
        after_prefixes(_ALL_FEATURES, each, several),
        _mixed_plan(capacity, _ALL_FEATURES, whole, 0),
        after_prefixes(_ALL_FEATURES, short, several),
        _mixed_plan(capacity, _ALL_FEATURES, [short], 0),
        *(
            _mixed_plan(capacity, _GREEDY, [min(tokens, whole[0])], 0, decodes)
            for decodes, tokens in FEW_ROWS
            if decodes < slots
        ),
        *_draft_plans(capacity),
        after_prefixes(_GREEDY, short, many),
        _mixed_plan(capacity, _GREEDY, [short] * many, 0, 0),
    ]


def _mixed_plan(
    capacity: Capacity,
    sampling: SamplingParams,
    lengths: Sequence[int],
    prefix: int,
    decodes: int | None = None,
) -> StepPlan:
    """Returns a step with chunks of `lengths` tokens, each after a prefix of `prefix` tokens, and `decodes` decode rows:
    by default one for every other slot."""
    if decodes is None:
        decodes = capacity.num_slots - len(lengths)
    # Several entries of the page table may share a page: the values in the cache do not matter
    slots = range(decodes, decodes + len(lengths))
    own = [(slot, index, 1) for slot in slots for index in range(capacity.pages_per_request)]
    others = [(slot, 0, 2 + slot) for slot in range(decodes)]
    with_drafts = capacity.num_drafts > 0
    return StepPlan(
        decode_slots=tuple(range(decodes)),
        decode_bounds=(1,) * decodes,
        chunks=tuple(
            PrefillChunk(slot, prefix, (0,) * length, is_last=True)
            for slot, length in zip(slots, lengths, strict=True)
        ),
        page_writes=(*own, *others),
        admitted=tuple(Admitted(slot, sampling, (0,)) for slot in range(slots.stop)),
        feeds_drafter=with_drafts,
        draft_bounds=(1,) * slots.stop if with_drafts else (),
    )


def _draft_plans(capacity: Capacity) -> list[StepPlan]:
    """Returns a step that verifies drafts, if there are any."""
    if not capacity.num_drafts:
        return []
    plan = _mixed_plan(capacity, _GREEDY, [1], 0, 1)
    return [replace(plan, num_drafts=capacity.num_drafts, tree_nodes=capacity.tree_nodes)]
