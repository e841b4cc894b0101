"""The flags by which the process of a rank learns where the ranks meet, and what they share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from mla_router.worker.nodes.messages import Meeting

if TYPE_CHECKING:
    from mla_router.worker.ranks.stores import Place


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store-fd", type=int, help="memory or socket of the store, see stores.py")
    parser.add_argument("--masks-fd", type=int, help="memory of the token bitmasks: mask_memory.py")
    parser.add_argument("--meeting", help="with several nodes: a Meeting, as JSON")
    parser.add_argument("--address", help="with several nodes: the own address for other ranks")


def place(arguments: argparse.Namespace) -> Place | None:
    """Returns the meeting of the ranks; None for one rank. Imports torch."""
    from mla_router.worker.ranks.stores import Place

    if arguments.meeting is not None:
        meeting = msgspec.json.decode(arguments.meeting, type=Meeting)
        return Place(arguments.store_fd, meeting, arguments.address)
    return None if arguments.store_fd is None else Place(arguments.store_fd)
