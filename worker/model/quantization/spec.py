"""The format of the quantized weights of a model, as its config.json or --quantization says it. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mla_router.worker.model.config.fields import ModelError

FP8, INT8 = "float8_e4m3fn", "int8"
FIELD = "quantization_config"

# Rows and columns that share a scale; None: all rows or columns of a weight
Block = tuple[int | None, int | None]
BLOCKS: Mapping[str, Block] = {"tensor": (None, None), "channel": (1, None)}


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str  # quant_method of config.json, or the value of --quantization
    dtype: str  # of the values: FP8 or INT8
    block: Block
    scale_name: str = "weight_scale"  # the scales of NAME.weight are NAME.{scale_name}
    ignored: tuple[str, ...] = ()  # plain layers: names, or `re:` and a pattern
    weight_only: bool = False  # activations are not quantized
    online: bool = False  # the checkpoint is plain, and its weights are quantized while they load
    kv_scales: Literal["needed", "optional"] | None = None  # of an FP8 KV cache (`kv_scales.py`)

    def ignores(self, name: str) -> bool:
        """Whether the layer `name` of the checkpoint, or a module around it, is not quantized."""
        for entry in self.ignored:
            if entry.startswith("re:"):
                if re.match(entry[3:], name):
                    return True
            elif name == entry or name.startswith(entry + "."):
                return True
        return False


def expect(raw: Mapping[str, Any], where: str, name: str, *values: object) -> None:
    """Raises ModelError unless the field `name` of `raw` is one of `values`; None stands for an absent field."""
    if raw.get(name) not in values:
        allowed = " or ".join(repr(value) for value in values)
        raise ModelError(f"{where}: {name} {raw.get(name)!r} is not supported, only {allowed}")


def read_block(raw: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Returns two positive integers. Raises ModelError."""
    match raw.get(name):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ModelError(f"{FIELD}: {name} {raw.get(name)!r} is not two positive integers")


def read_ignored(raw: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Returns the plain layers of the lists `names`. Raises ModelError."""
    entries = [entry for name in names for entry in raw.get(name) or ()]
    for entry in entries:
        if not isinstance(entry, str):
            raise ModelError(f"{FIELD}: {entry!r} in {names[0]} is not a name")
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"{FIELD}: {entry!r} in {names[0]}: {error}") from error
    return tuple(entries)
