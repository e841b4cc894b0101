"""Errors of the ranks of a worker."""

from __future__ import annotations


class RanksError(Exception):
    """Some ranks did not arrive in time, or their connections have ended. The message names them."""


class CallError(ValueError):
    """An engine call is too large, or its bytes are not a call."""
