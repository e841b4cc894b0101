"""The quantization_config of a config.json: the FP8 layers, and the names of their scales.

Three formats are read, all with weights in float8_e4m3fn:

* DeepSeek's (V3, R1): quant_method fp8 with weight_block_size; scales are `NAME.weight_scale_inv`.
* AutoFP8's: quant_method fp8 without weight_block_size; one `NAME.weight_scale` for each tensor.
* compressed-tensors' (llm-compressor), format float-quantized; `NAME.weight_scale` for each tensor, row or block.

Activations are not quantized, so their scales are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_router.worker.model.config.fields import ModelError


@dataclass(frozen=True, slots=True)
class Quantization:
    scale_name: str  # the scales of NAME.weight are NAME.{scale_name} in the checkpoint
    block: tuple[int | None, int | None]  # rows and columns that share a scale; None: all
    ignored: tuple[str, ...]  # plain layers: names, or `re:` and a pattern

    def ignores(self, name: str) -> bool:
        """Whether the layer `name` of the checkpoint, or a module around it, is not quantized."""
        for entry in self.ignored:
            if entry.startswith("re:"):
                if re.match(entry[3:], name):
                    return True
            elif name == entry or name.startswith(entry + "."):
                return True
        return False


def parse_quantization(raw: Mapping[str, Any]) -> Quantization:
    """Returns the parsed quantization_config. Raises ModelError, which names the field."""
    method = raw.get("quant_method")
    if method == "fp8":
        return _fp8(raw)
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    raise ModelError(
        f"quantization_config: quant_method {method!r} is not supported; supported are fp8 and "
        f"compressed-tensors"
    )


def _fp8(raw: Mapping[str, Any]) -> Quantization:
    _expect(raw, "quantization_config", "fmt", None, "e4m3", "float8_e4m3fn")
    _expect(raw, "quantization_config", "activation_scheme", None, "dynamic", "static")
    ignored = _ignored(raw, "modules_to_not_convert", "ignored_layers")
    if raw.get("weight_block_size") is None:
        return Quantization("weight_scale", (None, None), ignored)
    return Quantization("weight_scale_inv", _block(raw, "weight_block_size"), ignored)


def _compressed_tensors(raw: Mapping[str, Any]) -> Quantization:
    _expect(raw, "quantization_config", "format", "float-quantized", "naive-quantized")
    _expect(raw, "quantization_config", "kv_cache_scheme", None)
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ModelError("quantization_config: only one group in config_groups is supported")
    ((name, group),) = groups.items()
    where = f"quantization_config.config_groups.{name}"
    _expect(group, where, "targets", ["Linear"])
    weights, where = group.get("weights") or {}, f"{where}.weights"
    _expect(weights, where, "num_bits", 8)
    _expect(weights, where, "type", "float")
    _expect(weights, where, "symmetric", True, None)
    _expect(weights, where, "strategy", "tensor", "channel", "block")
    blocks: dict[str, tuple[int | None, int | None]] = {
        "tensor": (None, None),
        "channel": (1, None),
    }
    block = blocks.get(weights["strategy"]) or _block(weights, "block_structure")
    return Quantization("weight_scale", block, _ignored(raw, "ignore"))


def _expect(raw: Mapping[str, Any], where: str, name: str, *values: object) -> None:
    if raw.get(name) not in values:
        allowed = " or ".join(repr(value) for value in values)
        raise ModelError(f"{where}: {name} {raw.get(name)!r} is not supported, only {allowed}")


def _block(raw: Mapping[str, Any], name: str) -> tuple[int, int]:
    match raw.get(name):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ModelError(f"quantization_config: {name} {raw.get(name)!r} is not two positive integers")


def _ignored(raw: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    entries = [entry for name in names for entry in raw.get(name) or ()]
    for entry in entries:
        if not isinstance(entry, str):
            raise ModelError(f"quantization_config: {entry!r} in {names[0]} is not a name")
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"quantization_config: {entry!r} in {names[0]}: {error}") from error
    return tuple(entries)
