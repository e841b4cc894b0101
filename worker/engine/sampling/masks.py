"""Tokens that a grammar, or the request itself, does not allow."""

from __future__ import annotations

import torch
from torch import Tensor


def forbid(logits: Tensor, bits: Tensor) -> Tensor:
    """`logits` [M, V] with -inf where `bits` [M, ceil(V / 32)] int32 is 0, written over.

    Bit t % 32 of word t // 32 is token t (xgrammar's layout): on little-endian machines, which CUDA's
    all are, bit t % 8 of byte t // 8.
    """
    vocab_size = logits.shape[1]
    octets = bits.view(torch.uint8)
    power = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    forbidden = (octets[:, :, None] & power) == 0
    return logits.masked_fill_(forbidden.view(len(bits), -1)[:, :vocab_size], float("-inf"))
