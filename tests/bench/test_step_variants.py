"""Variants run on whole steps, and are undone afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from bench_one_batch import step_times
from mla_router.worker.engine.engine import Engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.model import linear as layer
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, StepPlan
from step_variants import applied, as_it_is, given_tokens, read_variants
from support.attention import torch_attention
from support.processes import ROOT
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

VARIANTS = """
import time

import mla_router.worker.model.linear as layer
from pathlib import Path

_linear = layer.linear

def slow(patch):
    def slower(*args, **options):
        time.sleep(0.002)
        return _linear(*args, **options)

    patch(layer, "linear", slower)
"""


def test_patches_are_undone(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    first, slow = read_variants(tmp_path / "variants.py")
    assert first is as_it_is and slow.__name__ == "slow"
    before = layer.linear
    with applied(slow):
        assert layer.linear is not before
    assert layer.linear is before


def test_rows_keep_their_tokens(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v2_lite"])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    capacity = Capacity(num_pages=8, page_size=4, num_slots=2, context_length=16)
    device = torch.device("cpu")
    engine = Engine(
        model, capacity, device=device, dtype=torch.float32, attention=torch_attention(model.config)
    )
    admitted = tuple(Admitted(slot, SamplingParams(9), (3,)) for slot in range(2))
    pages = tuple((slot, index, 1 + 4 * slot + index) for slot in range(2) for index in range(4))
    plans = [StepPlan((0, 1), (1, 1), (), pages, admitted), StepPlan((0, 1), (2, 2), (), (), ())]
    read = engine.slots
    with given_tokens(engine):
        given = read.last_token[:2].tolist()
        assert all(0 <= token < VOCAB_SIZE for token in given)
        _, results = step_times(engine, iter(plans))
        assert read.last_token[:2].tolist() == given
        assert engine.slots.last_token[:2, None].tolist() == results[-1].tokens
    assert engine.slots.last_token[:2].tolist() == given


def test_decode_steps_and_prompts(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", **CONFIGS["v2_lite"])
    (tmp_path / "variants.py").write_text(VARIANTS)
    script = ROOT / "bench" / "serving" / "step_variants.py"
    command = [sys.executable, str(script), str(tmp_path / "variants.py"), "--device", "cpu"]
    command += ["--model-path", str(tmp_path / "model"), "--out", str(tmp_path / "out.jsonl")]
    command += ["--batch-size", "2", "--prompt-len", "5", "--input-len", "6", "--output-len", "6"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert "prompt of 5 alone, ms:" in done.stdout and "+0.00%  as_it_is" in done.stdout
    decode, prompt = json.loads((tmp_path / "out.jsonl").read_text())["rows"]
    assert decode["what"] == "decode step, batch 2"
    for row in (decode, prompt):
        assert len(row["ms"]["slow"]) == 2 and min(row["ms"]["slow"]) > 2, "each waits that long"
