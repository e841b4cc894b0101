"""How much device memory a step needs besides weights and KV cache: found by running the dearest one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mla_router.worker.core import Admitted, Capacity, PrefillChunk, SamplingParams, StepPlan
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.rehearsal import compile_together, octaves
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.model.causal_lm import CausalLM

# A request that wants everything at once that costs memory.
_DEAREST = SamplingParams(
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
_CHEAPEST = SamplingParams(max_tokens=2)  # whose token a kernel of its own draws


SHORT_CHUNK = 16  # short ones have kernels of their own
# Decode rows, and tokens of the chunk beside them: so have few of either.
FEW_ROWS = (
    (1, 1),
    (4, 8),
    (16, SHORT_CHUNK),
    (32, SHORT_CHUNK),
    (64, SHORT_CHUNK),
    (160, SHORT_CHUNK),
)
# Short chunks at once, so that attention of their queries has more programs than a GPU has room for.
MANY_CHUNKS = 40


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes on the device."""

    tables: int  # of an engine's slots: their pages, their settings
    step: int  # activations and sampling of the largest step
    graphs: int  # CUDA graphs

    @property
    def total(self) -> int:
        return self.tables + self.step + self.graphs


def measure_working_memory(
    model: CausalLM,
    capacity: Capacity,
    *,
    prefill_tokens: int,
    graph_sizes: GraphSizes,
    device: torch.device,
    dtype: torch.dtype,
    attention: ModelAttention,
) -> WorkingMemory:
    """Of an engine of this `capacity` but for the number of its pages, on a CUDA device, in a step of
    `prefill_tokens` prompt tokens and of a decode row for every other slot. Compiles what they use."""
    small = replace(capacity, num_pages=capacity.num_slots)
    plans = dearest_plans(small, prefill_tokens, attention.max_keys)

    def new_engine() -> Engine:
        return Engine(model, small, device=device, dtype=dtype, attention=attention)

    compile_together(new_engine(), plans, graph_sizes)
    _free()
    before = torch.cuda.memory_allocated(device)
    engine = new_engine()
    tables = torch.cuda.memory_allocated(device) - before - engine.kv_cache.nbytes
    step = 0
    for plan in plans:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        # With what lies between tensors, where the next one does not fit; a small step may fit between others'
        reserved, allocated = (
            torch.cuda.memory_reserved(device),
            torch.cuda.memory_allocated(device),
        )
        engine.sample(engine.forward(plan)).wait()
        step = max(
            step,
            torch.cuda.max_memory_reserved(device) - reserved,
            torch.cuda.max_memory_allocated(device) - allocated,
        )
    # Of the last layer only rows are computed whose output is wanted, in no recording, and libraries load the kernel of
    # a new number of rows when it is first asked for.
    for rows in octaves(capacity.num_slots):
        nothing = torch.zeros(rows, model.config.hidden_size, dtype=dtype, device=device)
        model.logits(model.model.finish(nothing, nothing))
    graphs = _graph_bytes(engine, graph_sizes, device)
    del engine
    _free()
    return WorkingMemory(tables, step, graphs)


def _free() -> None:
    """What belonged to an engine that is no more: it refers to itself."""
    gc.collect()
    torch.cuda.empty_cache()


def _graph_bytes(engine: Engine, sizes: GraphSizes, device: torch.device) -> int:
    """Of all captured graphs: those of a kind share the memory of the largest, and each needs some of its own,
    found by capturing the smallest beside it."""

    def taken(some: GraphSizes) -> int:
        engine.capture_graphs(GraphSizes())
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        engine.capture_graphs(some)
        return max(0, free - torch.cuda.mem_get_info(device)[0])

    def of_kind(sizes: Sequence[int], only: Callable[[Sequence[int]], GraphSizes]) -> int:
        if not sizes:
            return 0
        largest = taken(only(sizes[-1:]))
        each = taken(only([sizes[0], sizes[-1]])) - largest if len(sizes) > 1 else 0
        return largest + max(0, each) * (len(sizes) - 1)

    return (
        of_kind(sizes.decode, lambda some: GraphSizes(decode=some))
        + of_kind(sizes.piecewise, lambda some: GraphSizes(piecewise=some))
        + of_kind(sizes.prefill, lambda some: GraphSizes(prefill=some))
    )


def dearest_plans(capacity: Capacity, prefill_tokens: int, max_keys: int) -> list[StepPlan]:
    """Steps that need most memory, and what else it takes for all kernels of steps to be among theirs. `max_keys`:
    as `AttentionBackend`; chunks follow prefixes with which they have more, if that can be."""
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
        after_prefixes(_DEAREST, each, several),
        _mixed_plan(capacity, _DEAREST, whole, 0),
        after_prefixes(_DEAREST, short, several),
        _mixed_plan(capacity, _DEAREST, [short], 0),
        *(
            _mixed_plan(capacity, _CHEAPEST, [min(tokens, whole[0])], 0, decodes)
            for decodes, tokens in FEW_ROWS
            if decodes < slots
        ),
        after_prefixes(_CHEAPEST, short, many),
        _mixed_plan(capacity, _CHEAPEST, [short] * many, 0, 0),
    ]


def _mixed_plan(
    capacity: Capacity,
    sampling: SamplingParams,
    lengths: Sequence[int],
    prefix: int,
    decodes: int | None = None,
) -> StepPlan:
    """Chunks of such lengths after so many tokens each, and so many decode rows: by default one for every other
    slot."""
    if decodes is None:
        decodes = capacity.num_slots - len(lengths)
    # A page may be that of several places: what is computed from it does not matter
    slots = range(decodes, decodes + len(lengths))
    own = [(slot, index, 1) for slot in slots for index in range(capacity.pages_per_request)]
    others = [(slot, 0, 2 + slot) for slot in range(decodes)]
    return StepPlan(
        decode_slots=tuple(range(decodes)),
        decode_lengths=(1,) * decodes,
        chunks=tuple(
            PrefillChunk(slot, prefix, (0,) * length, is_last=True)
            for slot, length in zip(slots, lengths, strict=True)
        ),
        page_writes=(*own, *others),
        admitted=tuple(Admitted(slot, sampling, (0,)) for slot in range(slots.stop)),
    )
