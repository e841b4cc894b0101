"""One scheduler process with three servers: each gets the messages of its own requests, and the scheduler's heartbeats."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mla_router.worker.messages import (
    Deltas,
    Generate,
    GetStats,
    Ready,
    Recorded,
    Shutdown,
    StartProfile,
    Stats,
    ToScheduler,
    ToServer,
    scheduler_socket,
    server_socket,
)
from mla_router.worker.scheduler.channel import MAX_BYTES, MAX_MESSAGES, ZmqChannel
from support.processes import EVENT_TIMEOUT_S
from support.scripted_scheduler import generate

SERVERS = 3


class Servers:
    """The servers' ends of the sockets."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.outbox = self.context.socket(zmq.PUSH)
        self.outbox.connect(scheduler_socket(folder))
        self.inboxes = [self.context.socket(zmq.PULL) for _ in range(SERVERS)]
        for server, inbox in enumerate(self.inboxes):
            inbox.bind(server_socket(folder, server))
        self.decoder = msgspec.msgpack.Decoder(ToServer)

    def send(self, message: ToScheduler) -> None:
        self.outbox.send(msgspec.msgpack.encode(message))

    def receive(self, server: int) -> ToServer:
        assert self.inboxes[server].poll(int(EVENT_TIMEOUT_S * 1000)), (
            f"nothing came to server {server}"
        )
        return self.decoder.decode(self.inboxes[server].recv())


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of a scheduler. The requests of the first test arrive before it is ready."""
    folder = tmp_path_factory.mktemp("ipc")
    servers = Servers(folder)
    flags = [f"--tokenizer-worker-num={SERVERS}", "--max-total-tokens=4096", "--cpu-threads=1"]
    command = [sys.executable, "-m", "mla_router.worker.scheduler", f"--ipc-dir={folder}"]
    process = subprocess.Popen([*command, *flags])
    try:
        yield servers
        servers.send(Shutdown())
        assert process.wait(EVENT_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        servers.context.destroy(linger=0)


def test_each_server_gets_messages_of_its_requests(servers: Servers) -> None:
    requests = {
        f"r{i}": generate(f"r{i}", [i + 1] * 20, 5 + i if i else 150, server=i % SERVERS)
        for i in range(9)
    }
    for request in requests.values():
        servers.send(request)
    # The same id from another server: only that server gets the error.
    servers.send(generate("r0", [1], 3, server=1))
    for server in range(SERVERS):
        servers.send(GetStats(100 + server, server))
    servers.send(StartProfile(7, 1, 2))

    readies = [servers.receive(server) for server in range(SERVERS)]
    assert isinstance(readies[0], Ready)
    assert readies == [readies[0]] * SERVERS
    for server in range(SERVERS):
        own = {rid for rid, request in requests.items() if request.server == server}
        ended: list[tuple[str, str]] = []
        queries: list[int] = []
        refused = {("r0", "error")} if server == 1 else set()
        wanted = {(rid, "length") for rid in own} | refused
        profiled = server != 2
        while (
            set(ended) != wanted or 100 + server not in queries or not profiled or 0 not in queries
        ):
            message = servers.receive(server)
            if isinstance(message, Stats):
                queries.append(message.query)
            elif isinstance(message, Recorded):
                assert (server, message.query) == (2, 7)
                profiled = True
            else:
                assert isinstance(message, Deltas)
                rids = [delta.rid for delta in message.items]
                assert set(rids) <= own | {rid for rid, _ in refused}
                assert len(set(rids)) == len(rids), "a step says one thing of a request"
                ended += [(d.rid, d.finish_reason) for d in message.items if d.finish_reason]
        assert len(ended) == len(wanted)
        assert set(queries) == {0, 100 + server}


def test_a_step_is_one_message_a_server(servers: Servers) -> None:
    """A message has a token of each running request: there are as many messages as steps."""
    requests: list[Generate] = [
        generate(f"r{i}", [i + 1], 40, server=i % SERVERS) for i in range(4 * SERVERS)
    ]
    for request in requests:
        servers.send(request)
    for server in range(SERVERS):
        running: set[str] = set()
        ended: set[str] = set()
        largest = 0
        while len(ended) < 4:
            message = servers.receive(server)
            if isinstance(message, Deltas):
                told = {delta.rid for delta in message.items}
                assert running <= told
                ended |= {delta.rid for delta in message.items if delta.finish_reason}
                running, largest = told - ended, max(largest, len(told))
        assert largest == 4


def test_a_flood_is_taken_in_parts(tmp_path: Path) -> None:
    """Running requests wait for the messages that are read between two steps."""
    flood = [generate(f"r{i}", [1] * 10, 1) for i in range(2 * MAX_MESSAGES + 1)]
    prompt = [2**20] * (MAX_BYTES // 12)  # 5 bytes a token
    long = [generate(f"long{i}", prompt, 1) for i in range(7)]
    servers, channel = Servers(tmp_path), ZmqChannel(tmp_path, SERVERS)
    try:
        for message in [*flood, *long]:
            servers.send(message)
        parts: list[list[ToScheduler]] = []
        while sum(map(len, parts)) < len(flood) + len(long):
            parts.append(channel.receive(EVENT_TIMEOUT_S))
            assert parts[-1], "nothing came"
    finally:
        channel.close()
        servers.context.destroy(linger=0)
    assert [message for part in parts for message in part] == [*flood, *long]
    assert max(map(len, parts)) <= MAX_MESSAGES
    assert max(sum(message in long for message in part) for part in parts) <= 3
