"""Decode steps compiled by torch.compile give the same results as uncompiled ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_router.worker.engine.runners.compiled_decode import CompiledDecode
from mla_router.worker.engine.runners.outputs import HeadOutput
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")

PROMPTS = [[3, 5, 7, 11], [2], [13, 17, 19, 23, 29, 31]]
NEXT = [[37, 41], [43, 47], [53, 59]]  # two tokens for each


class Prompts(ForwardDriver):
    """Requests with `PROMPTS`, each in a slot. `decode` runs a `Decode` on tokens of NEXT."""

    def begin(self) -> None:
        self.step(chunks=list(enumerate(PROMPTS)))

    @torch.inference_mode()
    def decode(self, rows: LookedUp) -> HeadOutput:
        tokens = {
            slot: NEXT[slot][length - len(PROMPTS[slot]) - 1]
            for slot, length in zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)
        }
        logprobs = self.step(tokens)
        return HeadOutput(logprobs, logprobs)


def rows(slots: Sequence[int], step: int) -> LookedUp:
    """The fields of `LookedUp` that `Prompts.decode` reads."""
    lengths = torch.tensor([len(PROMPTS[slot]) + step for slot in slots])
    nothing = torch.empty(0, dtype=torch.int64)
    return LookedUp(torch.tensor(slots), lengths, nothing, nothing, nothing)


@pytest.fixture
def quick_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Speeds Inductor up: it compiles a program for each vector instruction set of a CPU, which
    imports torch and takes a minute, and it keeps processes for further compilations."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # `reset` does not clear them
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("quick_inductor")
@torch.no_grad()
def test_as_transformers(tmp_path: Path) -> None:
    """Runs three rows, beyond the compiled sizes, then two, which are compiled."""
    write_tiny_model(tmp_path, **CONFIGS["v2_lite"])
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    driver = Prompts(model, page_size=4)
    driver.begin()
    decode = CompiledDecode(driver.decode, model, max_rows=2)
    graphs = torch._dynamo.utils.counters["stats"]
    decode(rows((0, 1, 2), 1))
    assert graphs["unique_graphs"] == 0
    got = decode(rows((0, 2), 2)).logits
    # Two projections, the dense layer and the shared experts are compiled once for all three layers.
    assert graphs["unique_graphs"] == 4
    assert not torch._dynamo.utils.counters["graph_break"]

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for slot, logprobs in zip((0, 2), got, strict=True):
        logits = reference(torch.tensor([PROMPTS[slot] + NEXT[slot]])).logits[0, -1]
        torch.testing.assert_close(logprobs, logits.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_nothing_is_left_in_the_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["llama_gqa"])
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    before = {module: set(vars(module)) for module in model.modules()}
    inside: list[int] = []

    def fail(rows: LookedUp) -> HeadOutput:
        del rows
        inside.append(sum(set(vars(m)) != before[m] for m in model.modules()))
        raise RuntimeError

    decode = CompiledDecode(fail, model, max_rows=4)
    for size in (5, 4):
        with pytest.raises(RuntimeError):
            decode(LookedUp(*torch.zeros(5, size, dtype=torch.int64)))
    assert inside == [0, 3 * len(model.model.layers)]  # two projections and the feed-forward layer
    assert before == {module: set(vars(module)) for module in model.modules()}
