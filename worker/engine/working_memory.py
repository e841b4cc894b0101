"""Measures the device memory that a step needs in addition to weights and KV cache, by a profile run of the largest steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.engine.warmup_compile import row_counts, warmup_compile
from mla_router.worker.generation import SamplingParams
from mla_router.worker.images import ImageInfo, ImageKind, ImagePart
from mla_router.worker.model.exchange import Exchange
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


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes of device memory."""

    tables: int  # page tables and sampling state of the request slots
    step: int  # activations and sampling of the largest step
    graphs: int  # CUDA graphs
    images: int  # embeddings of images, and a batch of the vision tower

    @property
    def total(self) -> int:
        return self.tables + self.step + self.graphs + self.images


def measure_working_memory(
    new_engine: Callable[[Capacity], Engine],
    capacity: Capacity,
    *,
    prefill_tokens: int,
    graph_sizes: GraphSizes,
) -> WorkingMemory:
    """Measures an engine of this `capacity` (its number of pages is ignored) on a CUDA device, in steps of
    `prefill_tokens` prompt tokens with a decode row for every other slot. Compiles the kernels of these steps."""
    small = replace(capacity, num_pages=capacity.num_slots)
    engine = new_engine(small)
    device = engine.device
    plans = profile_plans(small, prefill_tokens, engine.attention.max_keys)
    warmup_compile(engine, plans, graph_sizes)
    del engine
    _free()
    before = torch.cuda.memory_allocated(device)
    engine = new_engine(small)
    tables = torch.cuda.memory_allocated(device) - before - engine.kv_cache.nbytes
    step = max(_step_bytes(engine, plan) for plan in plans)
    _run_heads(engine)
    graphs = _graph_bytes(engine, graph_sizes)
    images = _image_bytes(engine)
    del engine
    _free()
    return WorkingMemory(tables, step, graphs, images)


def _step_bytes(engine: Engine, plan: StepPlan) -> int:
    """Runs a step, and returns the bytes of its activations and sampling."""
    device = engine.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    # Reserved memory includes fragmentation; allocated memory counts a small step that fits into free fragments
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    engine.sample(engine.forward(plan)).wait()
    return max(
        torch.cuda.max_memory_reserved(device) - reserved,
        torch.cuda.max_memory_allocated(device) - allocated,
    )


def _run_heads(engine: Engine) -> None:
    """Runs the end of the last layer and the head with all numbers of rows. They run outside of the graphs, only for the
    rows that are needed, and libraries load the kernel of a new number of rows at its first use."""
    model, group = engine.model, engine.model.groups.exchange
    for rows in row_counts(engine.capacity.num_slots):
        hidden_states = torch.zeros(
            rows, model.config.hidden_size, dtype=engine.dtype, device=engine.device
        )
        exchange = Exchange(None, group, (rows,) * group.size)
        model.logits(model.model.finish(hidden_states, hidden_states, exchange=exchange))


def _image_bytes(engine: Engine) -> int:
    """Returns the bytes of all images that are kept, and of the largest batch of the tower, which runs beside a step."""
    vision, capacity, device = engine.model.vision, engine.capacity, engine.device
    if vision is None:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    reserved = torch.cuda.memory_reserved(device)
    tiles = capacity.image_tiles
    info = ImageInfo(0, ImageKind.TILED, 0, tiles + 1, 1, 1, 1.0, (0.0,) * 3, (1.0,) * 3)
    encoded = engine.encode((ImagePart(info, bytes(tiles * 3 * vision.tile_size**2)),), ())
    engine.encode_layers(encoded.layers_left)
    torch.cuda.synchronize(device)
    batch = torch.cuda.max_memory_reserved(device) - reserved
    return batch + capacity.image_tokens * engine.model.config.hidden_size * engine.dtype.itemsize


def _free() -> None:
    """Frees the memory of deleted engines, which have reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def _graph_bytes(engine: Engine, sizes: GraphSizes) -> int:
    """Returns the bytes of all captured graphs. Graphs of one kind share the memory of the largest, and each needs some
    more, which is measured by capturing the smallest beside the largest."""

    def taken(kind: str, some: Sequence[int]) -> int:
        engine.capture_graphs(GraphSizes())
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(engine.device)[0]
        alone: dict[str, Any] = {kind: some}
        engine.capture_graphs(GraphSizes(**alone))
        return max(0, free - torch.cuda.mem_get_info(engine.device)[0])

    total = 0
    for kind, own in sizes.by_kind().items():
        if not own:
            continue
        largest = taken(kind, own[-1:])
        each = taken(kind, [own[0], own[-1]]) - largest if len(own) > 1 else 0
        total += largest + max(0, each) * (len(own) - 1)
    return total


def profile_plans(capacity: Capacity, prefill_tokens: int, max_keys: int) -> list[StepPlan]:
    """Returns the steps of the profile run: those that need most memory, and more steps until every kernel of a step is
    used. If possible, chunks have cached prefixes so long that their keys exceed `max_keys` (`AttentionBackend`)."""
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
