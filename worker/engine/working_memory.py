"""How much device memory a step needs besides weights and KV cache: found by running the dearest one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from mla_router.worker.core import Admitted, Capacity, PrefillChunk, SamplingParams, StepPlan
from mla_router.worker.engine.attention.layout import AttentionBackend
from mla_router.worker.engine.engine import Engine, GraphSizes
from mla_router.worker.engine.pieces import piece_sizes
from mla_router.worker.engine.rehearsal import compile_together
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


# Tokens before the chunk that is tried: longer prefixes are attended to in passes, as all are that do not
# fit at once, and take no more.
MAX_PREFIX = 1 << 17
SHORT_CHUNK = 16  # short ones have kernels of their own
# Decode rows, and tokens of the chunk beside them: so have few of either.
FEW_ROWS = ((1, 1), (4, 8), (16, SHORT_CHUNK), (32, SHORT_CHUNK), (64, SHORT_CHUNK))
# Short chunks at once, so that attention of their queries has more programs than a GPU has room for; and tokens before
# each, so many that all of them together are attended to in passes.
MANY_CHUNKS, SHORT_PREFIX = 40, 1 << 12


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
    attention: AttentionBackend,
) -> WorkingMemory:
    """Of an engine of this `capacity` but for the number of its pages, on a CUDA device, in a step of
    `prefill_tokens` prompt tokens and of a decode row for every other slot. Compiles what they use."""
    small = replace(capacity, num_pages=capacity.num_slots)
    plans = dearest_plans(small, prefill_tokens)

    def new_engine() -> Engine:
        return Engine(model, small, device=device, dtype=dtype, attention=attention)

    compile_together(new_engine(), plans, graph_sizes)
    _free()
    before = torch.cuda.memory_allocated(device)
    engine = new_engine()
    tables = torch.cuda.memory_allocated(device) - before - engine.cache.nbytes
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
    # Libraries load the kernel of a new number of rows when it is first asked for.
    for rows in piece_sizes(capacity.num_slots):
        engine.model.logits(torch.zeros(rows, model.config.hidden_size, dtype=dtype, device=device))
    graphs = _graph_bytes(engine, graph_sizes, device)
    del engine
    _free()
    return WorkingMemory(tables, step, graphs)


def _free() -> None:
    """What belonged to an engine that is no more: it refers to itself."""
    gc.collect()
    torch.cuda.empty_cache()


def _graph_bytes(engine: Engine, sizes: GraphSizes, device: torch.device) -> int:
    """Of all recordings: those of a kind share the memory of the largest, and each needs some of its own,
    found by recording the smallest beside it."""

    def taken(some: GraphSizes) -> int:
        engine.record_graphs(GraphSizes((), ()))
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        engine.record_graphs(some)
        return max(0, free - torch.cuda.mem_get_info(device)[0])

    def of_all(sizes: Sequence[int], only: Callable[[Sequence[int]], GraphSizes]) -> int:
        if not sizes:
            return 0
        largest = taken(only(sizes[-1:]))
        each = taken(only([sizes[0], sizes[-1]])) - largest if len(sizes) > 1 else 0
        return largest + max(0, each) * (len(sizes) - 1)

    return of_all(sizes.decode, lambda some: GraphSizes(some, ())) + of_all(
        sizes.prompts, lambda some: GraphSizes((), some)
    )


def dearest_plans(capacity: Capacity, prefill_tokens: int) -> list[StepPlan]:
    """Steps that need most memory, and what else it takes for all kernels of steps to be among theirs."""
    # Where one request cannot have so many, several have as many of them each
    chunks = min(-(-prefill_tokens // capacity.context_length), capacity.num_slots)
    tokens = min(prefill_tokens // chunks, capacity.context_length)
    short, prefix = min(SHORT_CHUNK, tokens), min(capacity.context_length - tokens, MAX_PREFIX)
    plans = [
        _mixed_plan(capacity, _DEAREST, some, start, chunks=chunks)
        for some, start in product((tokens, short), (prefix, 0))
    ]
    plans += [
        _mixed_plan(capacity, _CHEAPEST, min(some, tokens), 0, decodes)
        for decodes, some in FEW_ROWS
        if decodes < capacity.num_slots
    ]
    many = min(MANY_CHUNKS, capacity.num_slots)
    return plans + [
        _mixed_plan(capacity, _CHEAPEST, short, start, 0, many)
        for start in (min(prefix, SHORT_PREFIX), 0)
        if many * short <= prefill_tokens
    ]


def _mixed_plan(
    capacity: Capacity,
    sampling: SamplingParams,
    tokens: int,
    prefix: int,
    decodes: int | None = None,
    chunks: int = 1,
) -> StepPlan:
    """Chunks of so many tokens after so many, and so many decode rows: by default one for every other slot."""
    if decodes is None:
        decodes = capacity.num_slots - chunks
    prompt = (0,) * tokens
    # A page may be that of several places: what is computed from it does not matter
    slots = range(decodes, decodes + chunks)
    own = [(slot, index, 1) for slot in slots for index in range(capacity.pages_per_request)]
    others = [(slot, 0, 2 + slot) for slot in range(decodes)]
    return StepPlan(
        decode_slots=tuple(range(decodes)),
        decode_lengths=(1,) * decodes,
        chunks=tuple(PrefillChunk(slot, prefix, prompt, is_last=True) for slot in slots),
        page_writes=(*own, *others),
        admitted=tuple(Admitted(slot, sampling, prompt[:1]) for slot in range(decodes + chunks)),
    )
