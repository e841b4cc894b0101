"""One forward step on the device: what a plan becomes, launch by launch.

Nothing in `forward` and `sample` waits for the device; `Readback.wait` is the only place that does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_router.worker.core import Capacity, StepPlan, TokenMasks
from mla_router.worker.engine.attention.layout import AttentionBackend, ChunkExtent, StepLayout
from mla_router.worker.engine.compiled_decode import CompiledDecode
from mla_router.worker.engine.decode_rows import decode_rows
from mla_router.worker.engine.fresh_prompts import (
    FreshPrompts,
    RunPrompt,
    no_prompt,
    record_fresh_prompts,
)
from mla_router.worker.engine.graphs import DecodeGraphs, Recording, record_graphs
from mla_router.worker.engine.inputs import InputPacker, StepInputs
from mla_router.worker.engine.pieces import Pieces, record_pieces
from mla_router.worker.engine.readback import Readback, ReadbackRing
from mla_router.worker.engine.recordings import Recordings
from mla_router.worker.engine.sampling.sampler import Sampler
from mla_router.worker.engine.sampling.scores import RowScores, Run, score_hidden
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.kernels.kv_cache.locations import LookedUp
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.decoder import DecoderLayer


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched forward pass: logits of the rows that sample, and where those rows belong."""

    plan: StepPlan
    logits: Tensor  # [R, V] float32; sampling writes over them
    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64, of the tokens about to be sampled
    prompt_scores: RowScores | None
    began: float  # when its launch began, by `time.perf_counter`


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What to record as CUDA graphs, ascending."""

    decode: Sequence[int]  # rows of steps that are decode rows alone
    prompts: Sequence[int]  # rows of steps with prompts
    compiled: int = 0  # batch sizes of `decode` up to this one go through torch.compile


class Engine:
    """The model, its KV cache and the per-slot state of one device. Implements `StepEngine`."""

    def __init__(
        self,
        model: CausalLM,
        capacity: Capacity,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackend,
    ) -> None:
        self.model = model
        self.capacity = capacity
        self.device = device
        config = model.config
        # Page 0 belongs to nobody: unused entries of a page table point to it.
        self.cache = torch.zeros(
            config.cache_shape(capacity.num_pages + 1, capacity.page_size),
            dtype=dtype,
            device=device,
        )
        self.slots = SlotState(capacity, device)
        self.sampler = Sampler(capacity.num_slots, config.vocab_size, device)
        self.attention = attention
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        self._unattended = StepLayout(
            self.slots.page_table, capacity.page_size, nobody, nobody.to(torch.int32), 0
        )
        self._graphs = DecodeGraphs()
        self._pieces = Recordings[Pieces]()
        self._fresh_prompts = FreshPrompts()
        self._packer = InputPacker(device, capacity.pages_per_request)
        self._readback = ReadbackRing(device)
        self._began = 0.0  # when the launch of the last step began

    def beat_within_steps(self, beat: Callable[[], None]) -> None:
        """Call `beat` after each layer's attention where the host computes the layers: a step may take long
        there. On a GPU a step is launched in milliseconds, and nothing is called."""
        if self.device.type != "cpu":
            return
        for layer in self.model.model.layers:
            assert isinstance(layer, DecoderLayer), f"a layer that is {type(layer)}"
            layer.self_attn.register_forward_hook(lambda *_: beat())

    @torch.inference_mode()
    def record_graphs(self, sizes: GraphSizes) -> None:
        """Steps of these sizes become one launch, or one for each layer beside its attention."""
        self._graphs, self._pieces = DecodeGraphs(), Recordings()
        self._fresh_prompts = FreshPrompts()
        gc.collect()  # memory of earlier ones is free
        gc.disable()  # nothing may be freed on the device in the middle of a recording
        try:
            self._record(sizes)
        finally:
            gc.enable()

    @torch.inference_mode()
    def rehearse(
        self,
        plans: Sequence[StepPlan],
        sizes: GraphSizes,
        nothing_runs: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Launch the steps of `plans`, and decode rows and prompts alone of `sizes`, each within `nothing_runs`
        (`rehearsal.py`); nothing, if attention is planned on the host. The engine is of no further use."""
        if self._plan_fresh_prompt(1) is None:
            return
        for size in sizes.decode:
            rows = self.slots.idle_rows(size)
            with nothing_runs():
                self._decode(self.slots.look_up(rows))
        for size in sizes.prompts:
            run = self._plan_fresh_prompt(size)
            assert run is not None, (
                f"a prompt of {size} rows is planned on the host, one of 1 is not"
            )
            inputs = no_prompt(size, self.slots.idle_slot, self.device)
            with nothing_runs():
                run(inputs)
        for plan in plans:
            with nothing_runs():
                self.sample(self.forward(plan))

    def _record(self, sizes: GraphSizes) -> None:
        idle = self.slots.idle_slot
        if sizes.decode:
            compiled = None
            if sizes.compiled:
                compiled = CompiledDecode(self._decode, self.model, sizes.compiled)
            self._graphs = record_graphs(
                compiled or self._decode, self._prepare_decode, sizes.decode, self.slots
            )
            if compiled:
                compiled.report()
        if sizes.prompts:
            self._pieces = record_pieces(
                lambda batch: self.model.model.run_layers(batch, self.cache),
                lambda kind, tokens, slots, positions: self._compose(
                    kind,
                    self._unattended,
                    tokens=tokens,
                    positions=positions,
                    locations=self.slots.locations(slots, positions),
                ),
                sizes.prompts,
                idle_slot=idle,
                device=self.device,
            )
        runs = {size: run for size in sizes.prompts if (run := self._plan_fresh_prompt(size))}
        if runs:
            self._fresh_prompts = record_fresh_prompts(runs, idle_slot=idle, device=self.device)

    def _plan_fresh_prompt(self, rows: int) -> RunPrompt | None:
        chunk = ChunkExtent(self.slots.idle_slot, 0, rows)
        attention = self.attention.fresh_prompt(replace(self._unattended, chunks=(chunk,)))
        if attention is None:
            return None

        # Rows too many stand anywhere, if only where there are rotations
        last = self.capacity.context_length - 1
        positions = torch.arange(rows, device=self.device).clamp_(max=last)

        def run(inputs: Tensor) -> tuple[Tensor, Tensor]:
            locations = self.slots.prompt_locations(inputs[:2], rows)
            batch = ForwardBatch(
                tokens=inputs[2:],
                positions=positions,
                cache_locations=locations,
                num_decodes=0,
                attention=attention(locations),
            )
            return self.model.model.run_layers(batch, self.cache)

        return run

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Launched:
        self._began = time.perf_counter()
        # First of all recordings, that of a prompt alone included: few rows need no attention of prompts.
        recording = self._graphs.fitting(plan)
        if recording is not None:
            return self._replay(plan, recording)
        fresh = self._fresh_prompts.fitting(plan)
        if fresh is not None:
            alone = self._packer.pack_prompt(plan)
            self.slots.apply(alone.page_places, alone.pages)
            return self._finish(plan, *fresh.replay(alone.prompt))
        inputs = self._packer.pack(plan)
        self.slots.apply(inputs.page_places, inputs.pages)
        if plan.decode_slots:
            self._prepare_decode(plan.decode_slots, plan.decode_lengths)
        return self._finish(plan, *self._run_layers(plan, inputs))

    def _replay(self, plan: StepPlan, recording: Recording) -> Launched:
        """Any step that is decode rows alone, or can be."""
        rows = decode_rows(plan, recording.size, self.slots.idle_slot)
        inputs = self._packer.pack_rows(plan, rows)
        self.slots.apply(inputs.page_places, inputs.pages)
        self.slots.give(inputs.given)
        self._prepare_decode(rows.slots, rows.lengths)
        logits = recording.replay(self.slots, inputs.rows)
        self.sampler.admit(plan.admitted)
        if rows.first_are_sampled:
            logits = logits[: len(rows.sampled)]
        else:
            logits = logits.index_select(0, inputs.sampled)
        return Launched(
            plan, logits, inputs.sampled_slots, inputs.sampled_lengths, None, self._began
        )

    def _finish(self, plan: StepPlan, update: Tensor, stream: Tensor) -> Launched:
        """Of a step with prompts, once its layers are launched: nothing before needs what is packed here, and the
        device is at work meanwhile."""
        outputs = self._packer.pack_outputs(plan)
        self.sampler.admit(plan.admitted)
        hidden = self.model.model.finish(update, stream, outputs.rows)
        num_scored = len(outputs.score_tokens)
        num_sampled = len(outputs.slots)
        prompt_scores = None
        if num_scored:
            runs = [
                Run(i, len(chunk.score_tokens), self.sampler.wants.num_top(chunk.slot))
                for i, chunk in enumerate(plan.chunks)
                if chunk.score_tokens
            ]
            prompt_scores = score_hidden(
                hidden[num_sampled:], self.model.logits, outputs.score_tokens, runs
            )
        return Launched(
            plan,
            self.model.logits(hidden[:num_sampled]),
            outputs.slots,
            outputs.lengths,
            prompt_scores,
            self._began,
        )

    def _run_layers(self, plan: StepPlan, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Update and stream of all rows, as `Decoder.run_layers`: in recorded pieces, if the step is small enough
        for them."""
        decodes = len(plan.decode_slots)
        self.slots.take_up(inputs.rows, decodes)
        tokens, slots, positions = inputs.rows.unbind()
        layout = StepLayout(
            page_table=self.slots.page_table,
            page_size=self.capacity.page_size,
            decode_slots=slots[:decodes],
            decode_lengths=inputs.decode_lengths.to(torch.int32),
            max_decode_length=max(plan.decode_lengths, default=0),
            chunks=tuple(ChunkExtent(c.slot, c.start, len(c.tokens)) for c in plan.chunks),
        )
        batch = self._compose(
            ForwardBatch,
            layout,
            tokens=tokens,
            positions=positions,
            locations=self.slots.locations(slots, positions),
        )
        pieces = self._pieces.fitting(len(tokens))
        if pieces is None:
            return self.model.model.run_layers(batch, self.cache)
        return pieces.replay(batch, inputs.rows)

    def _prepare_decode(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.attention.prepare_decode(
            self.slots.page_table, self.capacity.page_size, slots, lengths
        )

    @torch.inference_mode()
    def _decode(self, rows: LookedUp) -> Tensor:
        """Logits of decode rows of which the host knows nothing but how many they are."""
        layout = StepLayout(
            page_table=self.slots.page_table,
            page_size=self.capacity.page_size,
            decode_slots=rows.slots,
            decode_lengths=rows.lengths,
            max_decode_length=self.capacity.context_length,
        )
        batch = self._compose(
            ForwardBatch,
            layout,
            tokens=rows.tokens,
            positions=rows.positions,
            locations=rows.locations,
        )
        return self.model.logits(self.model(batch, self.cache))

    def _compose(
        self,
        kind: type[ForwardBatch],
        layout: StepLayout,
        *,
        tokens: Tensor,
        positions: Tensor,
        locations: Tensor,
    ) -> ForwardBatch:
        """The batch of T rows: `tokens`, `positions` and `locations` [T]."""
        return kind(
            tokens=tokens,
            positions=positions,
            cache_locations=locations,
            num_decodes=len(layout.decode_slots),
            attention=self.attention.plan(layout),
        )

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: TokenMasks | None = None) -> Readback:
        tokens = self._readback.tokens(len(launched.slots))
        scores = self.sampler.sample(
            launched.logits,
            launched.slots,
            launched.positions,
            launched.plan,
            masks,
            last_token=self.slots.last_token,
            out=tokens,
        )
        return self._readback.start(
            launched.plan, tokens, scores, launched.prompt_scores, began=launched.began
        )

    def is_usable_after(self, error: Exception) -> bool:
        # A failed kernel leaves the CUDA context unusable, and whoever asks next is told: torch, Triton's launcher or
        # a library, each by an exception of its own. Memory that ran out does not.
        del error
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return False
        return True
