"""Work that would hold up the event loop: everybody's tokens go through it, and who asks for /health waits a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

# Messages, items and the like: to convert and render one takes some microseconds.
MAX_INLINE = 256

Result = TypeVar("Result")


async def beside_the_loop(work: Callable[[], Result], *, things: int) -> Result:
    """What `work` returns, in a thread if it is about so many things that the loop had better go on meanwhile."""
    return work() if things <= MAX_INLINE else await asyncio.to_thread(work)
