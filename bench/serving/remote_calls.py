"""The cost of engine calls to a rank on another node, encrypted by CURVE and in the clear.

    python bench/serving/remote_calls.py --out bench/results/remote_calls.jsonl

Both ends are processes of this machine and use its loopback interface, so no figure has a network in it. A call every 10 ms,
as often as steps: a decode plan of some rows, or a call to sample with the token bitmasks of some rows. Way: from before
the call is sent until it is decoded. CPU time: of the scheduler's thread, and of ZMQ's threads, which encrypt, at both ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.ranks.calls import EngineCall, Forward, Masks, Sample, encode
from mla_router.worker.ranks.remote_calls import RemoteCalls, RemoteReceiver, SessionKeys
from mla_router.worker.step.plan import StepPlan, TokenMasks

KEYS = SessionKeys("a secret of the nodes", "session")
VOCAB = 1 << 17
MOST_ROWS = 256
PERIOD_S = 0.01


class Clear(zmq.Socket[bytes]):
    """A socket that ignores keys and their checks."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("curve_"):
            super().__setattr__(name, value)

    def setsockopt(self, option: int, value: Any) -> None:
        if option not in (zmq.ZAP_DOMAIN, zmq.ZAP_ENFORCE_DOMAIN):
            super().setsockopt(option, value)


def in_the_clear() -> None:
    """Leaves out CURVE in this process."""
    zmq.Context._socket_class = Clear


def other_rank(encrypted: bool, endpoint: str, count: int, results: Connection) -> None:
    """Receives calls. Sends the time of each, and the CPU seconds of ZMQ's threads."""
    if not encrypted:
        in_the_clear()
    memory = MaskMemory.create(MOST_ROWS, VOCAB)
    with closing(RemoteReceiver(endpoint, 1, KEYS, memory)) as receiver:
        results.send(None)
        times, begin = [], zmq_cpu_s()
        while len(times) < count:
            if receiver.receive(10.0) is not None:
                times.append(time.monotonic())
        results.send((times, zmq_cpu_s() - begin))


def zmq_cpu_s() -> float:
    """Returns the CPU seconds of the other threads of this process."""
    return time.process_time() - time.thread_time()


def call(rows: int, masked: bool) -> tuple[EngineCall, np.ndarray | None]:
    if not masked:
        return Forward(StepPlan(tuple(range(rows)), (1000,) * rows, (), (), ())), None
    bits = np.zeros((rows, VOCAB // 32), np.int32)
    return Sample(Masks.of(TokenMasks(tuple(range(rows)), bits, 1))), bits


def measure(rows: int, masked: bool, encrypted: bool, count: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    with closing(RemoteCalls("127.0.0.1", range(1, 2), KEYS)) as leader:
        process = context.Process(
            target=other_rank, args=(encrypted, leader.endpoints[1], count, theirs), daemon=True
        )
        process.start()
        own.recv()
        leader.wait_connected(60.0)
        one, bits = call(rows, masked)
        sent, spent, begin = [], [], zmq_cpu_s()
        for _ in range(count):
            sent.append(time.monotonic())
            before = time.thread_time()
            leader.send(encode(one), bits)
            spent.append(time.thread_time() - before)
            time.sleep(PERIOD_S)
        received, their_cpu_s = own.recv()
        own_cpu_s = zmq_cpu_s() - begin
        process.join()
    ways = [after - before for before, after in zip(sent, received, strict=True)]

    def us(seconds: float) -> float:
        return round(1e6 * seconds, 1)

    return {
        "call": "bitmasks" if masked else "plan",
        "rows": rows,
        "bytes": len(encode(one)) + (0 if bits is None else bits.nbytes),
        "curve": encrypted,
        "way_us": us(statistics.median(ways)),
        "scheduler_cpu_us": us(statistics.median(spent)),
        "zmq_cpu_us": us(own_cpu_s / count),
        "their_zmq_cpu_us": us(their_cpu_s / count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=300, help="of each kind")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    args = parser.parse_args()
    rows = []
    for encrypted in (True, False):
        if not encrypted:
            in_the_clear()
        for size, masked in ((1, False), (32, False), (256, False), (1, True), (32, True)):
            rows.append(measure(size, masked, encrypted, args.calls))
            print(rows[-1], flush=True)
    config = {"calls": args.calls, "period_ms": 1e3 * PERIOD_S, "vocab_size": VOCAB}
    record("remote_calls", {"config": config, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
