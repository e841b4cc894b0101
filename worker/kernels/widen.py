"""Numbers of one byte as float32."""

from __future__ import annotations

import torch
from torch import Tensor

# All bits of a float16 without the highest bit of its exponent, as a signed number
_WITHOUT_TOP_OF_EXPONENT = -0x4001
_LARGEST_E4M3 = 448.0


def to_float32(values: Tensor) -> Tensor:
    """Returns `values`, FP8 or INT8, in float32. NaN stays NaN.

    On a CPU torch converts FP8 one by one. Here its bits become those of a float16, several at a time: E5M2 is the
    upper byte of a float16. E4M3 has one bit less of exponent, and its numbers are 256 times as large.
    """
    if values.device.type != "cpu" or not values.dtype.is_floating_point or values.itemsize > 1:
        return values.float()
    codes = values.view(torch.int8)
    bits = codes.to(torch.int16)
    if values.dtype == torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).float()
    assert values.dtype == torch.float8_e4m3fn, f"{values.dtype}"
    bits.bitwise_left_shift_(7).bitwise_and_(_WITHOUT_TOP_OF_EXPONENT)
    numbers = bits.view(torch.float16).float().mul_(256)
    if codes.numel() and (codes | -128).amax() == -1:  # the codes of NaN: all bits but for the sign
        numbers.masked_fill_(numbers.abs() > _LARGEST_E4M3, torch.nan)
    return numbers
