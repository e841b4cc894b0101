"""The engine: runs one step on the device.

`forward` and `sample` do not wait for the device. Only `AsyncCopy` does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from mla_router.worker.engine.async_copy import AsyncCopy, AsyncCopyBuffers
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.head import Head
from mla_router.worker.engine.images import EncodedImages
from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.runners.choose import choose_runner, fits_decode_graph
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import ForwardOutput, LayerOutput
from mla_router.worker.engine.runners.runners import Runners
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.engine.sampling.sampler import Sampler
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.engine.speculation.drafter import Drafter, DraftStep, NewDrafter
from mla_router.worker.images import ImagePart
from mla_router.worker.kv_cache.pool import KVCachePool
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.decoder import DecoderLayer
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import GroupStep, StepPlan, TokenMasks


class Engine:
    """The model, its KV cache and the state of the request slots on one device. Implements `StepEngine`."""

    def __init__(
        self,
        model: CausalLM,
        capacity: Capacity,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: ModelAttention,
        kv_cache_dtype: torch.dtype | None = None,
        new_drafter: NewDrafter | None = None,
    ) -> None:
        """`kv_cache_dtype`: by default `dtype`. If `model` is a rank's part, all ranks of a DP rank must run the same
        steps, and get the same results. DP ranks launch their steps together (`StepPlan.group`). `new_drafter`: for
        speculative decoding; by default none."""
        self.model = model
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype or dtype
        specs = model.config.kv_cache_specs(self.kv_cache_dtype)
        if new_drafter is not None:
            specs += new_drafter.kv_cache_specs(self.kv_cache_dtype)
        self.kv_cache = KVCachePool(
            specs,
            capacity.num_pages,
            capacity.page_size,
            device,
            own_windows=capacity.window is not None,
            tree_pages=capacity.tree_pages,
        )
        self.slots = SlotState(capacity, device)
        self.sampler = Sampler(
            capacity.num_slots, model.config.vocab_size, device, capacity.num_drafts
        )
        self.attention = attention
        packer = InputPacker(device, self.slots)
        self.forward_pass = ForwardPass(model, self.kv_cache, self.slots, attention, capacity)
        for_drafter = new_drafter is not None and new_drafter.reads_rows
        self.runners = Runners(self.forward_pass, packer, for_drafter=for_drafter)
        self._head = Head(self.forward_pass, packer, for_drafter=for_drafter)
        self._copies = AsyncCopyBuffers(device)
        self.drafter: Drafter | None = None
        if new_drafter is not None:
            caches = self.kv_cache.layers[model.config.num_layers :]
            self.drafter = new_drafter(self.forward_pass, caches, self.sampler.draws)

    def report_progress_within_steps(self, report: Callable[[], None]) -> None:
        """Calls `report` after each half of a layer on a CPU, where one step may take long. Does nothing on a GPU: a
        step is launched there in milliseconds."""
        if self.device.type != "cpu":
            return
        for layer in self.model.model.layers:
            assert isinstance(layer, DecoderLayer), f"a layer that is {type(layer)}"
            for half in (layer.self_attn, layer.mlp):
                half.register_forward_hook(lambda *_: report())

    @torch.inference_mode()
    def capture_graphs(self, sizes: GraphSizes) -> None:
        """Captures CUDA graphs of these sizes, in place of all earlier graphs."""
        self._capture(GraphSizes())
        gc.collect()  # frees the memory of earlier graphs
        gc.disable()  # nothing may be freed on the device during a capture
        try:
            self._capture(sizes)
        finally:
            gc.enable()

    def _capture(self, sizes: GraphSizes) -> None:
        self.runners.capture(sizes)
        self.forward_pass.images.capture_graphs(sizes.tiles)
        if self.drafter is not None:
            graphs = [*self.runners.decode_graph.graphs, *self.runners.verify_graph.graphs]
            self.drafter.capture(graphs, sizes.drafts)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardOutput:
        began = time.perf_counter()
        plan = self._agreed(plan)
        choice = choose_runner(plan, self.runners.sizes)
        runner = self.runners[choice.kind]
        inputs = runner.pack(plan, choice.rows)
        self.slots.write(inputs.entries, inputs.values)
        output = runner.run(plan, inputs)
        self.sampler.admit(plan.admitted)
        if self.drafter is not None and plan.admitted:
            self.drafter.admit(plan.admitted)
        if isinstance(output, LayerOutput):
            output = self._head.run(plan, output, self.sampler.features)
        return output._replace(began=began)

    def _agreed(self, plan: StepPlan) -> StepPlan:
        """Returns `plan` with a group, if there are other DP ranks. At their start engines run the same steps without an
        agreement."""
        group = self.model.groups.exchange
        if plan.group is None and group.size > 1:
            rows = (plan.num_tokens,) * group.size
            drafts = plan.feeds_drafter, plan.draft_slots
            plan = replace(plan, group=GroupStep(rows, fits_decode_graph(plan), *drafts))
        if plan.group is not None:
            rows = plan.group.rows
            assert len(rows) == group.size, f"{rows=}, {group.size} DP ranks"
            assert rows[group.rank] == plan.num_tokens, f"{rows=}, {group.rank=}, {plan=}"
        return plan

    @torch.inference_mode()
    def sample(self, forward: ForwardOutput, masks: TokenMasks | None = None) -> AsyncCopy:
        plan, slots = forward.plan, self.slots
        tokens = self._copies.tokens(len(forward.slots), plan.tokens_per_decode)
        sampled = self.sampler.sample(
            forward.logits,
            forward.slots,
            plan,
            masks,
            tokens=slots.tokens,
            out=tokens,
        )
        pending = self._copies.start(
            plan, tokens, sampled.logprobs, forward.prompt_logprobs, began=forward.began
        )
        drafter = self.drafter
        if drafter is not None and (
            plan.runs_drafter or plan.tree_nodes or drafter.follows_all_steps
        ):
            of_rows = slots.last_token[forward.slots] if sampled.tokens is None else sampled.tokens
            drafter.draft(DraftStep(forward, sampled, of_rows))
            if plan.returns_drafts:
                self._copies.start_drafts(pending, slots.chains(forward.slots))
            pending.extend()
        return pending

    @torch.inference_mode()
    def encode(self, parts: tuple[ImagePart, ...], dropped: tuple[int, ...]) -> EncodedImages:
        return self.forward_pass.images.encode(parts, dropped)

    @torch.inference_mode()
    def encode_layers(self, count: int) -> None:
        self.forward_pass.images.encode_layers(count)

    def is_usable_after(self, error: Exception) -> bool:
        # A failed kernel makes the CUDA context unusable, and every later call raises an error. Exhausted memory does
        # not. The type of `error` cannot tell: torch, Triton and the libraries raise different exceptions.
        del error
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return False
        return True
