"""The quantization_config of compressed-tensors, which llm-compressor writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.quantization.spec import (
    BLOCKS,
    FIELD,
    FP8,
    INT8,
    Block,
    Quantization,
    expect,
    read_block,
    read_ignored,
)

METHOD = "compressed-tensors"

# Format of the file: the type of its numbers
TYPES = {"float-quantized": "float", "int-quantized": "int"}


def parse_compressed_tensors(raw: Mapping[str, Any]) -> Quantization:
    """Returns the parsed config. Raises ModelError, which names the field."""
    expect(raw, FIELD, "format", *TYPES, "naive-quantized")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ModelError(f"{FIELD}: only one group in config_groups is supported")
    ((name, group),) = groups.items()
    where = f"{FIELD}.config_groups.{name}"
    expect(group, where, "targets", ["Linear"])
    expect(group, where, "output_activations", None)
    weights = group.get("weights") or {}
    kind = TYPES.get(raw["format"]) or weights.get("type")
    block = _weights(weights, f"{where}.weights", kind)
    activations = group.get("input_activations")
    if activations is not None:
        _activations(activations, f"{where}.input_activations", kind)
    return Quantization(
        METHOD,
        INT8 if kind == "int" else FP8,
        block,
        ignored=read_ignored(raw, "ignore"),
        weight_only=activations is None,
        kv_scales="needed" if _has_kv_scales(raw) else None,
    )


def _has_kv_scales(raw: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint has a scale for each layer's keys and values in an FP8 KV cache."""
    scheme, where = raw.get("kv_cache_scheme"), f"{FIELD}.kv_cache_scheme"
    if scheme is None:
        return False
    if not isinstance(scheme, Mapping):
        raise ModelError(f"{where}: {scheme!r} is not an object")
    _numbers(scheme, where, "float")
    expect(scheme, where, "strategy", "tensor")
    expect(scheme, where, "dynamic", None, False)
    return True


def _weights(raw: Mapping[str, Any], where: str, kind: str | None) -> Block:
    """Checks the numbers of the weights. Returns the block that shares a scale."""
    _numbers(raw, where, kind)
    expect(raw, where, "dynamic", None, False)
    strategies = ("tensor", "channel") if kind == "int" else ("tensor", "channel", "block")
    expect(raw, where, "strategy", *strategies)
    return BLOCKS.get(raw["strategy"]) or read_block(raw, "block_structure")


def _activations(raw: Mapping[str, Any], where: str, kind: str | None) -> None:
    _numbers(raw, where, kind)
    expect(raw, where, "dynamic", None, False, True)
    expect(raw, where, "strategy", None, "tensor", "token", "group")


def _numbers(raw: Mapping[str, Any], where: str, kind: str | None) -> None:
    """Checks for signed numbers of 8 bits without a zero point."""
    expect(raw, where, "num_bits", 8)
    expect(raw, where, "type", kind if kind in TYPES.values() else "float")
    expect(raw, where, "symmetric", True, None)
