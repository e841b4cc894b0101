"""The quantization_config of a config.json: quantized layers, their format, and the names of their scales.

These formats are read:

* DeepSeek's (V3, R1): quant_method fp8 with weight_block_size; scales are `NAME.weight_scale_inv`.
* AutoFP8's, static and dynamic: quant_method fp8 without weight_block_size; one `NAME.weight_scale` for each tensor.
* compressed-tensors' (llm-compressor): FP8 (format float-quantized), with `NAME.weight_scale` for each tensor, row or
  block, and INT8 (format int-quantized), with one for each tensor or row.

Weights have no zero points. If a config of compressed-tensors has no scheme of activations, products do not quantize
them. Otherwise the scheme is checked for its numbers, 8 bits without a zero point, and does not choose the arithmetic:
products quantize activations with a scale for each token and group of at most 128 columns, or not at all. Static scales
(`NAME.input_scale`) and one scale a token are coarser. So static scales are checked and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.quantization.compressed_tensors import (
    METHOD as COMPRESSED_TENSORS,
)
from mla_router.worker.model.quantization.compressed_tensors import parse_compressed_tensors
from mla_router.worker.model.quantization.spec import (
    BLOCKS,
    FIELD,
    FP8,
    Quantization,
    expect,
    read_block,
    read_ignored,
)


def parse_quantization(raw: Mapping[str, Any]) -> Quantization:
    """Returns the parsed quantization_config. Raises ModelError, which names the field."""
    method = raw.get("quant_method")
    if method == "fp8":
        return _fp8(raw)
    if method == COMPRESSED_TENSORS:
        return parse_compressed_tensors(raw)
    raise ModelError(
        f"{FIELD}: quant_method {method!r} is not supported; supported are fp8 and {COMPRESSED_TENSORS}"
    )


def _fp8(raw: Mapping[str, Any]) -> Quantization:
    expect(raw, FIELD, "fmt", None, "e4m3", "float8_e4m3fn")
    # DeepSeek-V3.1's scales are powers of two (ue8m0), in float32 as well
    expect(raw, FIELD, "scale_fmt", None, "float", "ue8m0")
    expect(raw, FIELD, "activation_scheme", None, "dynamic", "static")
    ignored = read_ignored(raw, "modules_to_not_convert", "ignored_layers")
    if raw.get("weight_block_size") is None:
        return Quantization("fp8", FP8, BLOCKS["tensor"], ignored=ignored, kv_scales="optional")
    block = read_block(raw, "weight_block_size")
    return Quantization("fp8", FP8, block, scale_name="weight_scale_inv", ignored=ignored)
