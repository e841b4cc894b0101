"""The scheduler process, from the view of its server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mla_router.worker.messages import (
    Abort,
    Deltas,
    FlushCache,
    Generate,
    GetStats,
    Ready,
    Shutdown,
    Stats,
    ToScheduler,
    ToServer,
    scheduler_socket,
    server_socket,
)
from support.processes import EVENT_TIMEOUT_S
from support.scripted_scheduler import generate


class Server:
    """The server's end of the sockets."""

    def __init__(self, folder: Path, *flags: str) -> None:
        context = zmq.Context.instance()
        self.inbox, self.outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.inbox.bind(server_socket(folder, 0))
        self.outbox.connect(scheduler_socket(folder))
        self.decoder = msgspec.msgpack.Decoder(ToServer)
        command = [sys.executable, "-m", "mla_router.worker.scheduler", f"--ipc-dir={folder}"]
        self.process = subprocess.Popen([*command, "--cpu-threads=1", *flags])
        self.ready = self.receive()

    def send(self, message: ToScheduler) -> None:
        self.outbox.send(msgspec.msgpack.encode(message))

    def receive(self) -> ToServer:
        assert self.inbox.poll(int(EVENT_TIMEOUT_S * 1000)), "nothing came from the scheduler"
        return self.decoder.decode(self.inbox.recv())

    def run(self, request: Generate) -> list[int]:
        self.send(request)
        tokens: list[int] = []
        while True:
            message = self.receive()
            for delta in message.items if isinstance(message, Deltas) else []:
                assert delta.rid == request.rid
                tokens += delta.token_ids
                if delta.finish_reason:
                    assert delta.finish_reason == "length", delta
                    return tokens

    def stats(self, message: GetStats | FlushCache) -> Stats:
        self.send(message)
        while True:
            answer = self.receive()
            if isinstance(answer, Stats) and answer.query == message.query:
                return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.inbox.close(0)
        self.outbox.close(0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), "--context-length=256", "--max-total-tokens=4096")
        try:
            yield server
            server.send(Shutdown())
            assert server.process.wait(EVENT_TIMEOUT_S) == 0
        finally:
            server.close()


def test_ready_and_the_first_request(server: Server) -> None:
    ready = server.ready
    assert isinstance(ready, Ready)
    assert (ready.context_length, ready.max_total_num_tokens) == (256, 4096)
    assert (ready.device, ready.dtype) == ("cpu", "float32")

    prompt = list(range(100, 150))
    first = server.run(generate("a", prompt, 20))
    assert len(first) == 20
    assert server.run(generate("b", prompt, 20)) == first
    stats = server.stats(GetStats(1))
    assert (stats.running, stats.waiting, stats.cached_tokens) == (0, 0, 48)
    assert stats.free_pages + stats.cached_pages == stats.total_pages
    assert server.stats(FlushCache(2)).free_pages == stats.total_pages


def test_an_abort_frees_slot_and_pages(server: Server) -> None:
    for i in range(20):
        server.send(generate(f"gone{i}", [i + 1] * 40, 200))
    for i in range(20):
        server.send(Abort(f"gone{i}"))
    ended = set()
    while len(ended) < 20:
        message = server.receive()
        for delta in message.items if isinstance(message, Deltas) else []:
            if delta.finish_reason:
                ended.add(delta.rid)
    stats = server.stats(GetStats(3))
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_slots == stats.total_slots
    assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_garbage_on_the_wire_is_dropped(server: Server) -> None:
    server.outbox.send(b"\xff not msgpack")
    server.outbox.send(msgspec.msgpack.encode(["Generate", "short"]))
    assert len(server.run(generate("after", [1, 2, 3], 3))) == 3


INVALID = {
    "--context-length=99999999": "--context-length",
    "--device=cuda": "--device cuda",
    "--model-path=/nowhere": "--model-path /nowhere",
    "--max-total-tokens=3": "no room",
}
# A process for each flag, all from one with torch, whose import takes longer than the rest.
FORKS = """
import os, sys
from mla_router.worker.ranks import load
from mla_router.worker.scheduler.__main__ import main
for flag in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        os._exit(main([sys.argv[1], flag]))
    print(flag, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_invalid_settings_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, f"--ipc-dir={tmp_path}", *INVALID]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{flag} 2" for flag in INVALID], done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    for error, named in zip(errors, INVALID.values(), strict=True):
        assert named in error
    assert "Traceback" not in done.stderr


# Two processes: of a device that goes on after the error, and of one that is lost.
FAILING = """
import os, sys
from mla_router.worker.engine.engine import Engine
from mla_router.worker.scheduler.__main__ import main
def fail(self, plan):
    raise RuntimeError("strides should be multiple of 16 bytes")
Engine.forward = fail
for usable in (True, False):
    child = os.fork()
    if child == 0:
        Engine.is_usable_after = lambda self, error: usable
        os._exit(main(sys.argv[1:]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_model_that_fails_its_first_step_is_not_ready(tmp_path: Path) -> None:
    """With status 2, to start it again would not help."""
    context = zmq.Context.instance()
    with context.socket(zmq.PULL) as inbox:
        inbox.bind(server_socket(tmp_path, 0))
        command = [sys.executable, "-c", FAILING, f"--ipc-dir={tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not inbox.poll(0), "it has said that it is ready"
    assert done.stdout.split() == ["2", "1"], done.stderr
    assert done.stderr.count("the scheduler cannot continue") == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "fails its first step: RuntimeError: strides should be multiple of 16 bytes" in error
