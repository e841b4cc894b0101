"""Engine calls to other machines: only the rank that they are for can read them, and a lost connection is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.ranks import remote_calls
from mla_router.worker.ranks.calls import EngineCall, Forward, Masks, Sample, encode
from mla_router.worker.ranks.errors import CallError, RanksError
from mla_router.worker.ranks.remote_calls import RemoteCalls, RemoteReceiver, SessionKeys
from mla_router.worker.step.plan import PrefillChunk, StepPlan, TokenMasks

KEYS = SessionKeys("a secret of the nodes", "session")
VOCAB_SIZE = 70  # three words
EVENT_TIMEOUT_S = 60.0


@pytest.fixture
def leader() -> Iterator[RemoteCalls]:
    with closing(RemoteCalls("127.0.0.1", range(2, 4), KEYS)) as leader:
        yield leader


def masks() -> MaskMemory:
    return MaskMemory.create(4, VOCAB_SIZE)


def receiver(leader: RemoteCalls, rank: int, keys: SessionKeys = KEYS) -> RemoteReceiver:
    return RemoteReceiver(leader.endpoints[rank], rank, keys, masks())


def plan(tokens: tuple[int, ...]) -> StepPlan:
    chunk = PrefillChunk(0, 0, tokens, True)
    return StepPlan((), (), chunks=(chunk,), page_writes=(), admitted=())


def next_call(receiver: RemoteReceiver) -> EngineCall:
    call = receiver.receive(EVENT_TIMEOUT_S)
    assert call is not None
    return call


def test_calls_and_bitmasks_arrive_in_order(leader: RemoteCalls) -> None:
    with ExitStack() as opened:
        others = {rank: opened.enter_context(closing(receiver(leader, rank))) for rank in (2, 3)}
        leader.wait_connected(EVENT_TIMEOUT_S)
        bits = np.arange(6, dtype=np.int32).reshape(2, 3)
        calls: list[tuple[EngineCall, np.ndarray | None]] = [
            (Forward(plan((5,) * 30_000)), None),
            (Sample(), None),
            (Forward(plan((6,))), None),
            (Sample(Masks.of(TokenMasks((0, 3), bits, 7))), bits),
        ]
        for call, sent in calls:
            leader.send(encode(call), sent)
        for other in others.values():
            assert [next_call(other) for _ in calls] == [call for call, _ in calls]
            assert other.receive(0.0) is None
            last = calls[-1][0]
            assert isinstance(last, Sample) and last.masks is not None
            np.testing.assert_array_equal(last.masks.read(other._masks).bits, bits)


@pytest.mark.parametrize(
    ("rank", "keys"),
    [
        (2, SessionKeys("another secret", "session")),
        (2, SessionKeys("a secret of the nodes", "an earlier session")),
        (3, KEYS),  # has rank 0's public key, but not the key of rank 2
    ],
)
def test_a_stranger_gets_no_calls(leader: RemoteCalls, rank: int, keys: SessionKeys) -> None:
    stranger = RemoteReceiver(leader.endpoints[2], rank, keys, masks())
    with closing(stranger):
        with pytest.raises(RanksError, match=r"rank 2 has not connected to tcp://127.0.0.1:\d+"):
            leader.wait_connected(0.3)
        with pytest.raises(CallError, match="rank 2 takes no calls"):
            leader.send(encode(Sample()), None)


def test_no_further_process_can_connect_after_the_ranks(leader: RemoteCalls) -> None:
    with (
        closing(receiver(leader, 2)) as first,
        closing(receiver(leader, 3)) as other,
    ):
        leader.wait_connected(EVENT_TIMEOUT_S)
        with closing(receiver(leader, 2)) as late:
            with pytest.raises(CallError, match="has ended"):
                for _ in range(100):
                    late.receive(EVENT_TIMEOUT_S)
            for _ in range(4):
                leader.send(encode(Sample()), None)
        for _ in range(4):
            assert next_call(first) == next_call(other) == Sample()


def test_the_end_of_rank_0_ends_a_rank(leader: RemoteCalls) -> None:
    with closing(receiver(leader, 2)) as one, closing(receiver(leader, 3)):
        leader.wait_connected(EVENT_TIMEOUT_S)
        leader.close()
        with pytest.raises(CallError, match=r"has ended \(DISCONNECTED\)"):
            one.receive(EVENT_TIMEOUT_S)


def test_a_rank_that_takes_no_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "MAX_WAITING", 2)
    with closing(RemoteCalls("127.0.0.1", range(1, 2), KEYS)) as own, closing(receiver(own, 1)):
        own.wait_connected(EVENT_TIMEOUT_S)
        frame = encode(Forward(plan((7,) * 1_000_000)))
        with pytest.raises(CallError, match="rank 1 takes no calls"):
            for _ in range(100):
                own.send(frame, None)


def test_bitmasks_that_do_not_fit_are_refused(leader: RemoteCalls) -> None:
    bits = np.zeros((5, 3), dtype=np.int32)  # more rows than the memory has
    with closing(receiver(leader, 2)) as one, closing(receiver(leader, 3)):
        leader.wait_connected(EVENT_TIMEOUT_S)
        leader.send(encode(Sample(Masks.of(TokenMasks((0,), bits, 1)))), bits)
        with pytest.raises(CallError, match="60 bytes"):
            one.receive(EVENT_TIMEOUT_S)
        leader.send(encode(Sample()), bits)
        with pytest.raises(CallError, match="a Sample with 1 parts"):
            one.receive(EVENT_TIMEOUT_S)
