"""Makes Triton's interpreter more than twice as fast, without a change of its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


class NothingToRestore:
    def restore(self) -> None: ...


def make_faster() -> None:
    """Must be called once."""
    _replace_language_once_a_launch()
    # Each sum of integers is also computed in 64 bits, for an assertion that the interpreter then leaves out.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _replace_language_once_a_launch() -> None:
    """The interpreter replaces the functions of `triton.language` at each launch, and again in each call of one kernel
    function by another, where nothing is left to replace. The search took two fifths of its time."""
    replace_all = interpreter._patch_lang
    replaced = set[ModuleType]()  # in the running launch

    @cache
    def modules_of(function: Callable[..., Any]) -> set[ModuleType]:
        values = function.__globals__.values()
        return {module for module in (language, language.core) if any(v is module for v in values)}

    def replace_new(function: Callable[..., Any]) -> Any:
        if modules_of(function) <= replaced:
            return NothingToRestore()
        is_launch = not replaced
        scope = replace_all(function)
        replaced.update(modules_of(function))
        if is_launch:
            scope.restore = lambda: (type(scope).restore(scope), replaced.clear())
        return scope

    interpreter._patch_lang = replace_new
