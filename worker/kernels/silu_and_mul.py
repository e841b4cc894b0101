"""The gated activation of SwiGLU feed-forward layers (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up lie side by side in the last axis.

    gate_up [..., 2I]; the result is [..., I] of the same dtype.
    """
    assert gate_up.shape[-1] % 2 == 0, f"gate_up {tuple(gate_up.shape)} needs an even last axis"
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
