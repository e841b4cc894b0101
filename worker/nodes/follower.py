"""Node 0 as another node sees it: how the node finds it, and what both tell each other while their ranks run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mla_router.worker.config import WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.nodes.address import host_port
from mla_router.worker.nodes.equal import facts
from mla_router.worker.nodes.link import HANDSHAKE_S, Link, LinkError, WrongKeyError
from mla_router.worker.nodes.messages import Ended, Hello, LeaderBeat, Refused, Session, Welcome

RETRY_S = 0.5
NO_PAGES: Mapping[int, Heartbeat] = MappingProxyType({})


class NodeError(Exception):
    """The reason why this node cannot take part. A later attempt may succeed."""


class RefusedError(LinkError):
    """Node 0 does not take this node now."""


class SettingsError(NodeError):
    """The settings of the nodes differ: a later attempt would fail as well."""


async def join(
    config: WorkerConfig, warn: Callable[[str], None], urls: Sequence[str] = ()
) -> tuple[Link, Session]:
    """Connects to node 0, which may start later. `warn` gets the reason of a refusal, once. `urls`: of the workers on
    this node.

    Raises NodeError after --dist-timeout, SettingsError.
    """
    deadline = time.monotonic() + config.dist_timeout
    hello = Hello(config.node_rank, facts(config), tuple(urls))
    told = reason = ""
    while time.monotonic() < deadline:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await _join_once(config, hello)
        except (WrongKeyError, RefusedError) as error:
            reason = str(error)
            if reason != told:
                warn(f"node 0 at {config.dist_init_addr}: {reason}; trying again")
                told = reason
        except TimeoutError:
            reason = reason or "it does not answer"
        except OSError as error:
            reason = error.strerror or str(error)
        except LinkError as error:
            reason = str(error)
        await asyncio.sleep(RETRY_S)
    raise NodeError(
        f"after {config.dist_timeout:g} s (--dist-timeout) node 0 at {config.dist_init_addr} (--dist-init-addr) has not "
        f"taken this node: {reason}"
    )


async def _join_once(config: WorkerConfig, hello: Hello) -> tuple[Link, Session]:
    """Raises OSError, LinkError, WrongKeyError, RefusedError, SettingsError."""
    host, port = host_port(config.dist_init_addr)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            link = await Link.connect(reader, writer, config.dist_key)
            link.send(hello)
            answer = await link.receive(HANDSHAKE_S)
        match answer:
            case Welcome(session):
                return link, session
            case Refused(reason, is_final=True):
                raise SettingsError(reason)
            case Refused(reason):
                raise RefusedError(reason)
            case Ended(reason):
                raise LinkError(reason)
            case _:
                raise LinkError("a message that does not belong here")
    except BaseException:
        writer.transport.abort()
        raise


async def follow(
    link: Link, rank_0: Heartbeat, timeout_s: float, others: Mapping[int, Heartbeat] = NO_PAGES
) -> str:
    """Copies the state of rank 0 to its page on this machine until node 0 ends its ranks. Returns the reason.

    `others`: with DP attention, the pages of all ranks of other nodes, which get the states of these ranks instead.
    `timeout_s`: longest silence. Raises LinkError.
    """
    while True:
        match await link.receive(timeout_s):
            case LeaderBeat(ranks=states) if others and len(states) > max(others):
                for rank, page in others.items():
                    page.report(states[rank].age_s, is_frozen=states[rank].is_frozen)
            case LeaderBeat(serves, expected_s) if not others:
                rank_0.mirror(serves=serves, expected_s=expected_s)
            case Ended(reason):
                return reason
            case _:
                raise LinkError("a message that does not belong here")
