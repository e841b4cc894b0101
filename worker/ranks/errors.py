"""Errors of the ranks of a worker."""

from __future__ import annotations


class RanksError(Exception):
    """The ranks of the worker did not meet. The message names the missing ones."""


class CallError(ValueError):
    """An engine call is too large, or its bytes are no call."""
