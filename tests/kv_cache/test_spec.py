"""The size of KV cache rows, in elements and bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import torch

from mla_router.worker.kv_cache.spec import HeadsSpec, LatentSpec, bytes_per_token, own_window

LATENT = LatentSpec(dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64)
HEADS = HeadsSpec(dtype=torch.float32, num_kv_heads=2, head_dim=24, v_head_dim=16)


def test_width_and_bytes() -> None:
    assert LATENT.width == 576 and LATENT.bytes_per_token == 1152
    assert HEADS.width == 2 * (24 + 16) and HEADS.bytes_per_token == 320
    assert bytes_per_token([LATENT, HEADS, LATENT]) == 2 * 1152 + 320


def test_layers_with_pages_of_their_own() -> None:
    """As many layers with one window as without one, and equal rows."""
    local, wider = replace(HEADS, window=8), replace(HEADS, window=9)
    assert own_window([local, HEADS, HEADS, local]) == 8
    for specs in (
        [HEADS, HEADS],
        [local, local],
        [local, HEADS, HEADS],
        [local, wider, HEADS, HEADS],
        [local, replace(HEADS, head_dim=8)],
        [replace(LATENT, window=8), HEADS],
    ):
        assert own_window(specs) is None, specs


def test_torch_is_not_imported() -> None:
    """The settings are checked against a config in a process without torch."""
    program = "import sys, mla_router.worker.kv_cache.spec; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
