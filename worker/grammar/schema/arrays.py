"""Rewrites arrays whose items depend on each other (`contains`, `uniqueItems`) into alternatives of independent
items."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

from mla_router.worker.grammar.schema.merge import both
from mla_router.worker.grammar.schema.values import Inexact, Schema, finite, types_of

MAX_CONTAINING = 16  # items of an array with `contains`
MAX_ARRAYS = 1000  # arrays in the list for `uniqueItems`


def containing(part: Schema) -> list[Schema]:
    """Returns alternatives without `contains`, one for each position of the item. Raises Inexact."""
    if "contains" not in part:
        return [{key: part[key] for key in part if key not in ("minContains", "maxContains")}]
    if part.get("minContains", 1) != 1 or "maxContains" in part:
        raise Inexact("`minContains` and `maxContains` are not supported")
    most = part.get("maxItems", MAX_CONTAINING + 1)
    if types_of(part) != ["array"] or most > MAX_CONTAINING:
        raise Inexact(
            f"`contains` is supported only together with `type`: array and `maxItems` of at most {MAX_CONTAINING}"
        )
    rest = {key: value for key, value in part.items() if key not in ("contains", "minContains")}
    items, given = part.get("items", True), part.get("prefixItems", [])
    alternatives = []
    for at in range(most):
        prefix = [given[index] if index < len(given) else items for index in range(at)]
        own = both(given[at] if at < len(given) else items, part["contains"])
        least = max(part.get("minItems", 0), at + 1)
        places = {
            "prefixItems": [*prefix, own, *given[at + 1 :]],
            "items": items,
            "minItems": least,
        }
        alternatives.append({**rest, **places})
    return alternatives


def settled(part: Schema) -> Any:
    """Returns the schema of an array without `uniqueItems`; False if no array is possible. Its inner schemas are
    settled. Raises Inexact."""
    part = dict(part)
    least, most = part.get("minItems", 0), part.get("maxItems", math.inf)
    prefix: list[Any] | None = part.get("prefixItems")
    if prefix is not None:
        if False in prefix:
            most = min(most, prefix.index(False))
        prefix = prefix[: int(min(len(prefix), most))]
        part["prefixItems"] = prefix
        if not prefix:
            del part["prefixItems"]
    if part.get("items") is False:
        most = min(most, len(prefix or []))
    if least > most:
        return False
    if math.isfinite(most):
        part["maxItems"] = int(most)
    if part.get("items") is False and not prefix:
        part["items"] = True  # there are no items
    if part.pop("uniqueItems", False) and most > 1:
        return _without_repeats(part, least, most)
    return part


def _without_repeats(part: Schema, least: int, most: float) -> Any:
    values = finite(part.get("items", True))
    if values is None or "prefixItems" in part or types_of(part) != ["array"]:
        raise Inexact(
            "`uniqueItems` is supported only together with `items` of few values, as an `enum` lists them"
        )
    most = int(min(most, len(values)))
    if sum(math.perm(len(values), length) for length in range(least, most + 1)) > MAX_ARRAYS:
        raise Inexact(
            f"`uniqueItems` allows more than {MAX_ARRAYS} arrays here: list fewer values, or set a lower `maxItems`"
        )
    arrays = [
        list(items) for length in range(least, most + 1) for items in permutations(values, length)
    ]
    return {"enum": arrays} if arrays else False
