"""The flags with the location of the rendezvous, and of the memory that ranks share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from mla_router.worker.nodes.messages import Session

if TYPE_CHECKING:
    from mla_router.worker.ranks.stores import StoreLocation


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store-fd", type=int, help="memory or socket of the store, see stores.py")
    parser.add_argument("--masks-fd", type=int, help="memory of the token bitmasks: mask_memory.py")
    parser.add_argument("--session", help="with several nodes: a Session, as JSON")
    parser.add_argument("--address", help="with several nodes: the own address for other ranks")


def store_location(arguments: argparse.Namespace) -> StoreLocation | None:
    """Returns the location of the rendezvous store; None for one rank. Imports torch."""
    from mla_router.worker.ranks.stores import StoreLocation

    if arguments.session is not None:
        session = msgspec.json.decode(arguments.session, type=Session)
        return StoreLocation(arguments.store_fd, session, arguments.address)
    return None if arguments.store_fd is None else StoreLocation(arguments.store_fd)
