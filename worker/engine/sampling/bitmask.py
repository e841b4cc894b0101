"""Masks tokens that a grammar or the request does not allow."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_bitmask(logits: Tensor, bits: Tensor) -> Tensor:
    """Sets `logits` [M, V] to -inf, in place, where `bits` [M, ceil(V / 32)] int32 is 0. Returns them.

    Bit t % 32 of word t // 32 is token t (xgrammar's layout). On little-endian machines, the only ones with CUDA, that is
    bit t % 8 of byte t // 8.
    """
    vocab_size = logits.shape[1]
    octets = bits.view(torch.uint8)
    power = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    masked = (octets[:, :, None] & power) == 0
    return logits.masked_fill_(masked.view(len(bits), -1)[:, :vocab_size], float("-inf"))
