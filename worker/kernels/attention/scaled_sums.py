"""Sums of attention that are scaled in few blocks of keys alone, in Gluon.

Weights of a row refer to a maximum of its scores, and with each larger maximum all sums so far are multiplied by a factor.
The maximum need not be exact: it is replaced once a score exceeds it by more than SLACK. Most factors are then 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of scores to base 2: the largest weight is up to 2^8, not exactly 1, and is rounded like the others
SLACK = gl.constexpr(8.0)
SCALED = gl.constexpr(32)  # numbers of a thread that are scaled, or left, together


@gluon.jit
def settled(maximum, block_maximum):
    """Returns the maximum for the weights: the old one if the new block's exceeds it by SLACK at most, else the new one."""
    new = gl.maximum(maximum, block_maximum)
    return gl.where(new > maximum + SLACK, new, maximum)


@gluon.jit
def scaled(acc, factor):
    """Returns sums times a factor for each row. A warp leaves out this product where all its factors are 1."""
    factors = gl.expand_dims(
        gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout), assert_trivial=True), 1
    )
    return gl.inline_asm_elementwise(
        _scaling(SCALED)[0],
        _scaling(SCALED)[1],
        [acc, factors],
        dtype=gl.float32,
        is_pure=True,
        pack=SCALED,
    )


@gluon.constexpr_function
def _scaling(count: int) -> tuple[str, str]:
    """Returns assembly that multiplies this many numbers of a thread, and its constraints. The numbers are in two rows,
    which take turns after every second one."""
    one, results = "0f3F800000", range(count)
    first, second = 2 * count, 2 * count + 2
    lines = [
        "{.reg .pred p, q;",
        f"setp.neu.f32 p, ${first}, {one};",
        f"setp.neu.or.f32 p, ${second}, {one}, p;",
        "vote.sync.any.pred q, p, 0xffffffff;",
        "@!q bra DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in results),
        "DONE: }",
    ]
    constraints = ["=f"] * count + [str(i) for i in results] + ["f"] * count
    return "\n".join(lines), ",".join(constraints)
