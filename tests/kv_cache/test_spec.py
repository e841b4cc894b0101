"""The size of KV cache rows, in elements and bytes."""

from __future__ import annotations

import subprocess
import sys

import torch

from mla_router.worker.kv_cache.spec import HeadsSpec, LatentSpec, bytes_per_token

LATENT = LatentSpec(dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64)
HEADS = HeadsSpec(dtype=torch.float32, num_kv_heads=2, head_dim=24, v_head_dim=16)


def test_width_and_bytes() -> None:
    assert LATENT.width == 576 and LATENT.bytes_per_token == 1152
    assert HEADS.width == 2 * (24 + 16) and HEADS.bytes_per_token == 320
    assert bytes_per_token([LATENT, HEADS, LATENT]) == 2 * 1152 + 320


def test_torch_is_not_imported() -> None:
    """The settings are checked against a config in a process without torch."""
    program = "import sys, mla_router.worker.kv_cache.spec; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
