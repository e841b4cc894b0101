"""The arguments of FlashInfer's MLA decode, against a stand-in that computes what its documentation says."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_router.worker.engine.attention.flashinfer_mla import FlashInferMlaBackend, PlannedDecode
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.engine import Engine
from mla_router.worker.messages import ToScheduler
from mla_router.worker.model.config.attention_spec import LatentAttentionSpec
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from support.paged_cache import expected_attention, random_cache
from support.scripted_scheduler import generate, run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
LATENT, ROTARY = 512, 64


class Wrapper:
    """`BatchMLAPagedAttentionWrapper` as documented: request i of a plan has the queries
    qo_indptr[i] .. qo_indptr[i + 1], and kv_len_arr[i] rows in the pages from kv_indices[kv_indptr[i]] on. A plan is
    written to the current pinned buffer."""

    def __init__(self, workspace: Tensor, backend: str) -> None:
        assert backend == "fa3" and workspace.dtype == torch.uint8
        self._pin_memory_int_workspace_buffer = torch.empty(64, dtype=torch.uint8)
        self.buffers: list[int] = []

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for given in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert given.dtype == torch.int32 and given.ndim == 1
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert (head_dim_ckv, head_dim_kpe, causal) == (LATENT, ROTARY, False)
        self.buffers.append(self._pin_memory_int_workspace_buffer.data_ptr())
        self.planned = SimpleNamespace(
            queries=qo_indptr.tolist(),
            first_pages=kv_indptr.tolist(),
            pages=kv_indices,
            lengths=kv_len_arr.tolist(),
            page_size=page_size,
            scale=sm_scale,
            shape=(num_heads, q_data_type, kv_data_type),
        )

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> Tensor:
        planned = self.planned
        assert planned.shape == (q_nope.shape[1], q_nope.dtype, ckv.dtype)
        assert len(q_nope) == planned.queries[-1] and ckv.shape[1] == planned.page_size
        out = torch.empty_like(q_nope)
        for i, length in enumerate(planned.lengths):
            first, count = planned.first_pages[i], -(-length // planned.page_size)
            pages = planned.pages[first : first + count].long()
            latents, keys = (part[pages].flatten(0, 1)[:length].double() for part in (ckv, kpe))
            rows = slice(planned.queries[i], planned.queries[i + 1])
            scores = q_nope[rows].double() @ latents.T + q_pe[rows].double() @ keys.T
            out[rows] = ((scores * planned.scale).softmax(-1) @ latents).to(out.dtype)
        return out


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    package, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_anywhere_in_the_page_table(page_size: int) -> None:
    lengths = [1, 40, 16, 17, 100]
    draw = torch.Generator().manual_seed(page_size)
    paged = random_cache(lengths, page_size, LATENT + ROTARY, dtype=torch.float64, generator=draw)
    q = torch.randn(len(lengths), 3, LATENT + ROTARY, dtype=torch.float64, generator=draw)
    decode = PlannedDecode(3, 0.07, torch.float64, CPU)
    decode.plan(paged.page_table, page_size, paged.slots.tolist(), lengths)
    got = decode.run(*q.split([LATENT, ROTARY], dim=-1), paged.cache)
    torch.testing.assert_close(got, expected_attention(q, paged, LATENT, 0.07, 1))


@pytest.mark.usefixtures("flashinfer")
def test_two_buffers_alternate() -> None:
    """The copy of the previous plan may still be in flight."""
    decode = PlannedDecode(3, 0.07, torch.float64, CPU)
    for step in range(4):
        decode.plan(torch.zeros(5, 2, dtype=torch.int32), 16, (0, 4), (1 + step, 2))
    wrapper: Any = decode._wrapper
    assert wrapper.buffers[:2] == wrapper.buffers[2:] and len(set(wrapper.buffers)) == 2


@pytest.mark.usefixtures("flashinfer")
def test_transformers_tokens(tmp_path: Path) -> None:
    """Requests with a common prefix arrive and end, in decode steps and mixed steps."""
    widths = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROTARY}
    write_tiny_model(tmp_path, **CONFIGS["v2_lite"] | widths)
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    capacity = Capacity(num_pages=100, page_size=4, num_slots=3, context_length=64)
    (spec,) = model.config.attention_specs
    prefill = TorchBackend(spec, CPU, torch.float32, torch.float32)
    attention = ModelAttention([FlashInferMlaBackend(prefill, spec, CPU, torch.float32)])
    assert attention.name == "torch+flashinfer_mla" and not attention.supports_decode_graph
    engine = Engine(model, capacity, device=CPU, dtype=torch.float32, attention=attention)
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(10)]
    prompts = [shared + rng.choices(range(VOCAB_SIZE), k=1 + 3 * n) for n in range(6)]
    script: dict[int, list[ToScheduler]] = {
        3 * n: [generate(f"r{n}", prompt, 12)] for n, prompt in enumerate(prompts)
    }
    outcome = run(
        script, engine=engine, capacity=capacity, vocab_size=VOCAB_SIZE, chunk_size=8
    ).channel
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for n, prompt in enumerate(prompts):
        whole = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert outcome.tokens(f"r{n}") == whole[0, len(prompt) :].tolist()


LATENTS = LatentAttentionSpec(
    num_heads=16,
    scale=0.1,
    kv_lora_rank=LATENT,
    qk_nope_head_dim=128,
    qk_rope_head_dim=ROTARY,
    v_head_dim=128,
)


def reason(spec: LatentAttentionSpec = LATENTS) -> str | None:
    return FlashInferMlaBackend.supports(spec, torch.device("cuda"), torch.bfloat16, torch.bfloat16)


@pytest.mark.usefixtures("flashinfer")
def test_it_serves_latents_of_its_width() -> None:
    assert reason() is None
    narrow = reason(replace(LATENTS, kv_lora_rank=256))
    assert narrow is not None and narrow.endswith("qk_rope_head_dim (512, 64), not (256, 64)")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    assert "pip install 'mla-router[flashinfer]'" in (reason() or "")


@pytest.mark.usefixtures("flashinfer")
def test_without_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert reason() == "needs a Hopper GPU (sm_90), not sm_89"
