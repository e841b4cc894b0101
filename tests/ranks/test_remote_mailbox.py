"""Messages between DP ranks on several nodes: each reaches all others in order, and nobody else takes part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import zmq

from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.ranks.errors import RanksError
from mla_router.worker.ranks.remote_calls import SessionKeys
from mla_router.worker.ranks.remote_mailbox import RemoteMailbox
from mla_router.worker.scheduler.lockstep import Lockstep

KEYS = SessionKeys("a secret of the nodes", "session")
EVENT_TIMEOUT_S = 60.0
SIZE = 3


def opened(rank: int, keys: SessionKeys = KEYS) -> RemoteMailbox:
    return RemoteMailbox("127.0.0.1", rank, SIZE, keys)


@contextmanager
def closing(boxes: list[RemoteMailbox]) -> Iterator[list[RemoteMailbox]]:
    try:
        yield boxes
    finally:
        for box in boxes:
            box.close()


def connect(boxes: list[RemoteMailbox], timeout_s: float = EVENT_TIMEOUT_S) -> None:
    endpoints = {box.rank: box.endpoint for box in boxes}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda box: box.connect(endpoints, timeout_s), boxes))


def test_messages_reach_all_others_in_order() -> None:
    with closing([opened(rank) for rank in range(SIZE)]) as boxes:
        connect(boxes)
        for number in range(20):
            boxes[0].send(b"from 0: %d" % number)
        for box in boxes[1:]:
            assert box.wake.poll(EVENT_TIMEOUT_S * 1000)
            found = [box.receive(EVENT_TIMEOUT_S) for _ in range(20)]
            assert found == [b"from 0: %d" % number for number in range(20)]
            assert box.receive() is None
        assert boxes[0].receive(0.01) is None


def test_dp_ranks_agree_over_it() -> None:
    with closing([opened(rank) for rank in range(SIZE)]) as boxes, ThreadPoolExecutor() as pool:
        connect(boxes)
        ranks = [Lockstep(box, Heartbeat.create()) for box in boxes]

        def values(rank: int) -> list[float]:
            return [ranks[rank].largest(value) for value in (rank, -rank, 5.0)]

        assert list(pool.map(values, range(SIZE))) == [[2.0, 0.0, 5.0]] * SIZE


@pytest.mark.parametrize(
    "keys",
    [
        SessionKeys("another secret", "session"),
        SessionKeys("a secret of the nodes", "an earlier session"),
    ],
)
def test_a_stranger_is_not_let_in(keys: SessionKeys) -> None:
    stranger = opened(2, keys)
    with closing([opened(0), opened(1), stranger]) as boxes, ThreadPoolExecutor() as pool:
        endpoints = {box.rank: box.endpoint for box in boxes}
        others = [pool.submit(box.connect, endpoints, 1.0) for box in boxes]
        for one in others:
            with pytest.raises(RanksError, match=r"DP rank|connection to"):
                one.result(EVENT_TIMEOUT_S)


def test_nobody_can_connect_later() -> None:
    with closing([opened(rank) for rank in range(SIZE)]) as boxes:
        connect(boxes)
        context = zmq.Context()
        late = context.socket(zmq.PUSH)
        late.curve_serverkey = KEYS.dp_rank(0)[0]
        late.curve_publickey, late.curve_secretkey = KEYS.dp_rank(1)
        late.connect(boxes[0].endpoint)
        late.send(b"late")
        assert boxes[0].receive(0.3) is None
        boxes[1].send(b"from 1")
        assert boxes[0].receive(EVENT_TIMEOUT_S) == b"from 1"
        context.destroy(linger=0)


def test_the_end_of_a_dp_rank_is_noticed() -> None:
    with closing([opened(rank) for rank in range(SIZE)]) as boxes:
        connect(boxes)
        boxes.pop().close()
        for box in boxes:
            with pytest.raises(RanksError, match="the connection to DP rank 2 has ended"):
                box.receive(EVENT_TIMEOUT_S)


def test_a_dp_rank_that_does_not_come_is_named() -> None:
    with closing([opened(rank) for rank in range(SIZE)]) as boxes:
        endpoints = {box.rank: box.endpoint for box in boxes}
        with pytest.raises(
            RanksError, match=r"after 0.2 s \(--dist-timeout\) DP rank 1 and DP rank 2 have"
        ):
            boxes[0].connect(endpoints, 0.2)
