"""Reading the fields of a config.json, each with an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


class ModelError(ValueError):
    """A model folder that cannot be served; the message says what is wrong with it."""


def size(raw: Mapping[str, Any], name: str) -> int:
    """A positive integer that has to be there. Raises ModelError."""
    value = raw.get(name)
    if value is None:
        raise ModelError(f"{name} is missing")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} {value!r} is not a positive integer")
    return value


def optional_size(raw: Mapping[str, Any], name: str) -> int | None:
    """None if absent, null or 0."""
    return size(raw, name) if raw.get(name) else None


def expect(raw: Mapping[str, Any], name: str, *values: object) -> None:
    """Refuse what would change the arithmetic: only absent, null or one of `values`."""
    if raw.get(name) not in (None, *values):
        allowed = " or ".join(map(str, values)) or "none"
        raise ModelError(f"{name} {raw[name]!r} is not supported, only {allowed}")


def read_dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(name)
