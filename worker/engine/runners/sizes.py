"""Numbers of rows for which steps are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Rows of the graphs of each kind, ascending. A step takes the next larger size, and the rows too many are padding:
    rows of the idle slot, which lie in page 0."""

    decode: Sequence[int] = ()
    piecewise: Sequence[int] = ()
    prefill: Sequence[int] = ()
    compiled: int = 0  # sizes of `decode` up to this one go through torch.compile


def decode_sizes(largest: int) -> list[int]:
    """Sizes up to `largest`: every one where a row more costs most, then steps of an eighth of the size, which
    bounds the padding."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < largest:
        step = max(4, 1 << ((sizes[-1] - 1).bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]


def prompt_sizes(largest: int) -> list[int]:
    """Sizes of piecewise and prefill graphs: powers of two, and the numbers halfway between."""
    sizes = [16]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last * 3 // 2 if last & (last - 1) == 0 else last // 3 * 4)
    return [size for size in sizes if size <= largest]
