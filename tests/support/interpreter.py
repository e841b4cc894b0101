"""Makes Triton's interpreter faster.

It replaces the functions of `triton.language` at each launch, and again in each call of one kernel function by another,
where nothing is left to replace. The search takes two fifths of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


class NothingToRestore:
    def restore(self) -> None: ...


def replace_once_a_launch() -> None:
    """Must be called once."""
    replace = interpreter._patch_lang
    replaced = set[ModuleType]()  # in the running launch

    @cache
    def modules_of(function: Callable[..., Any]) -> set[ModuleType]:
        values = function.__globals__.values()
        return {module for module in (language, language.core) if any(v is module for v in values)}

    def replace_new(function: Callable[..., Any]) -> Any:
        if modules_of(function) <= replaced:
            return NothingToRestore()
        is_launch = not replaced
        scope = replace(function)
        replaced.update(modules_of(function))
        if is_launch:
            scope.restore = lambda: (type(scope).restore(scope), replaced.clear())
        return scope

    interpreter._patch_lang = replace_new
