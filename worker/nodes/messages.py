"""The messages between two nodes, in msgpack, and their settings for each other."""

from __future__ import annotations

from typing import Union

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message is a tagged array: field names are not sent."""


class Session(msgspec.Struct, frozen=True):
    """One start of the group, and the store of its rendezvous."""

    id: str  # random, in hex
    store_host: str
    store_port: int


class Hello(Message, frozen=True):
    """The first message of a node other than 0."""

    node: int
    facts: dict[str, str]  # see `equal.py`
    urls: tuple[str, ...] = ()  # of the workers on the node: its DP ranks, with DP attention


class Welcome(Message, frozen=True):
    """The answer to `Hello`: the node starts its ranks."""

    session: Session


class Refused(Message, frozen=True):
    """The other answer to `Hello`."""

    reason: str
    is_final: bool  # a later attempt with the same settings would fail as well


class RankState(Message, frozen=True):
    """The state of a rank, as its own node sees it."""

    age_s: float  # seconds since its last heartbeat
    is_frozen: bool


class LeaderBeat(Message, frozen=True):
    """The state of rank 0, sent every BEAT_S seconds. With DP attention also that of all ranks, in order, because the
    server of each DP rank watches all of them."""

    serves: bool
    expected_s: float  # seconds that the steps in flight should take
    ranks: tuple[RankState, ...] = ()


class NodeBeat(Message, frozen=True):
    """The state of the ranks of a node, in order, sent every BEAT_S seconds."""

    ranks: tuple[RankState, ...]


class Ended(Message, frozen=True):
    """The ranks of the sender end, and with them the group."""

    reason: str


AnyMessage = Union[Hello, Welcome, Refused, LeaderBeat, NodeBeat, Ended]  # noqa: UP007 (msgspec)
