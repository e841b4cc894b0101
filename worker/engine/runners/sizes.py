"""Numbers of rows of the captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Numbers of rows of each kind of graph, ascending. A step runs in the next larger size. The additional rows are
    padding: rows of the idle slot, whose pages are page 0."""

    decode: Sequence[int] = ()
    piecewise: Sequence[int] = ()
    prefill: Sequence[int] = ()
    compiled: int = 0  # `decode` sizes up to this one are compiled by torch.compile
    # Speculative decoding: rows of decode slots that verify drafts, all of the slots equally many; and numbers of slots
    # for which the drafter has graphs
    verify: Sequence[int] = ()
    drafts: Sequence[int] = ()
    tiles: Sequence[int] = ()  # numbers of tiles of the vision tower, without padding

    def by_kind(self) -> dict[str, Sequence[int]]:
        """Returns the sizes of each kind of graph by the name of its field."""
        names = (field.name for field in fields(self) if field.name != "compiled")
        return {name: getattr(self, name) for name in names}


def decode_sizes(largest: int) -> list[int]:
    """Returns sizes up to `largest`: nearly all small ones, where a padding row costs most, then powers of two and
    three sizes between each two. Kernels change at powers of two: a batch of 128 padded to 132 rows would take the
    slower ones."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < largest:
        step = max(4, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]


def prompt_sizes(largest: int) -> list[int]:
    """Returns sizes of piecewise and prefill graphs: powers of two, and the numbers halfway between."""
    sizes = [16]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last * 3 // 2 if last & (last - 1) == 0 else last // 3 * 4)
    return [size for size in sizes if size <= largest]
