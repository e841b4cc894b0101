"""Reads fields of a config.json, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
# The largest size that fits the int32 indices of kernels
MAX_SIZE = 2**31 - 1
# Far above any factor that makes sense, and the products of a few are finite in float32
MAX_NUMBER = 1e6


class ModelError(ValueError):
    """A model folder that cannot be served, for the reason in the message."""


def size(raw: Mapping[str, Any], name: str, *, most: int = MAX_SIZE) -> int:
    """Returns a positive integer up to `most`. Raises ModelError if it is missing or not one."""
    value = raw.get(name)
    if value is None:
        raise ModelError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} {value!r} is not a positive integer")
    if value > most:
        raise ModelError(f"{name} {value} is more than {most}")
    return value


def optional_size(raw: Mapping[str, Any], name: str) -> int | None:
    """Returns a positive integer, or None if it is absent, null or 0. Raises ModelError."""
    return None if raw.get(name) in (None, 0) else size(raw, name)


def number(
    raw: Mapping[str, Any],
    name: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    most: float = MAX_NUMBER,
) -> float:
    """Returns a number above `above` and up to `most`; `default` if it is absent or null. Raises ModelError if it is not one,
    or is missing without a default."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ModelError(f"{name} is missing")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and above < value <= most):
        raise ModelError(f"{name} {value!r} is not a number above {above:g} and up to {most:g}")
    return float(value)


def optional_number(
    raw: Mapping[str, Any], name: str, *, above: float = 0.0, most: float = MAX_NUMBER
) -> float | None:
    """Returns such a number, or None if it is absent, null or 0. Raises ModelError."""
    return None if raw.get(name) in (None, 0) else number(raw, name, above=above, most=most)


def expect(raw: Mapping[str, Any], name: str, *values: object) -> None:
    """Raises ModelError unless the field is absent, null or one of `values`: others would change the arithmetic."""
    if raw.get(name) not in (None, *values):
        allowed = " or ".join(map(str, values)) or "none"
        raise ModelError(f"{name} {raw[name]!r} is not supported, only {allowed}")


def read_dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(name)
