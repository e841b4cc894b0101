"""Token bitmasks from lists of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from mla_router.worker.step.plan import TokenMasks


def token_masks(allowed: Mapping[int, Collection[int]], vocab_size: int) -> TokenMasks:
    """Returns the bitmasks of `rows`, ascending, with the allowed tokens of each."""
    table = np.zeros((len(allowed), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, tokens in enumerate(allowed.values()):
        table[row, list(tokens)] = 1
    return TokenMasks(tuple(allowed), np.packbits(table, axis=1, bitorder="little").view(np.int32))


def token_bits(allowed: Collection[int], vocab_size: int) -> bytes:
    """Returns a set of tokens in the form of `SamplingParams.allowed`."""
    return token_masks({0: allowed}, vocab_size).bits.tobytes()[: -(-vocab_size // 8)]
