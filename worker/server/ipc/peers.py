"""Messages between the API processes of a worker: questions, and integers as answers.

Each process receives on one socket. There are few messages: sums are in the shared counters, and tokens come from the
scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq

from mla_router.worker.messages import PeerQuery, PeerReply, PeerRequest, ToPeer
from mla_router.worker.server.ipc.inbox import Inbox
from mla_router.worker.server.ipc.questions import Questions

ANSWER_S = 10.0
NO_ANSWER = 0  # the query number of a message whose answer nobody awaits

Answer = Callable[[PeerQuery], Awaitable[int]]


class Peers:
    """Use inside the event loop's thread only."""

    def __init__(
        self, own: int, receive: zmq.Socket[bytes], send: dict[int, zmq.Socket[bytes]]
    ) -> None:
        """`own` is the number of this process. `send` has a socket to each of the others, by number."""
        self._own = own
        self._send = send
        self._inbox = Inbox(receive, msgspec.msgpack.Decoder(ToPeer), self._handle)
        self._encoder = msgspec.msgpack.Encoder()
        self._questions = Questions[int]("A process of this worker does not answer")
        self._answer: Answer | None = None
        self._answering: set[asyncio.Task[None]] = set()

    def start(self, answer: Answer) -> None:
        """Starts to answer questions by `answer`, also those that arrived before."""
        self._answer = answer
        self._inbox.start()

    def stop(self) -> None:
        self._inbox.stop()
        for task in self._answering:
            task.cancel()

    async def ask(self, server: int, question: PeerQuery, timeout: float | None = ANSWER_S) -> int:
        """Asks process number `server`. Raises Unavailable after `timeout` seconds; None: waits without limit."""
        return await self._questions.ask(
            lambda query: self._post(server, PeerRequest(self._own, query, question)), timeout
        )

    async def ask_all(self, question: PeerQuery, timeout: float | None = ANSWER_S) -> list[int]:
        """Returns the answers of all other processes."""
        return await asyncio.gather(*(self.ask(server, question, timeout) for server in self._send))

    def tell_all(self, question: PeerQuery) -> None:
        """Sends `question` to all other processes and does not wait for answers."""
        for server in self._send:
            self._post(server, PeerRequest(self._own, NO_ANSWER, question))

    def _post(self, server: int, message: ToPeer) -> None:
        self._send[server].send(self._encoder.encode(message), zmq.NOBLOCK)

    def _handle(self, message: ToPeer) -> None:
        if isinstance(message, PeerReply):
            self._questions.answer(message.query, message.value)
        else:
            task = asyncio.create_task(self._reply(message))
            self._answering.add(task)  # the event loop has only weak references to tasks
            task.add_done_callback(self._answering.discard)

    async def _reply(self, asked: PeerRequest) -> None:
        assert self._answer is not None
        self._post(asked.sender, PeerReply(asked.query, await self._answer(asked.question)))


@asynccontextmanager
async def join(directory: Path, own: int, servers: int) -> AsyncIterator[Peers]:
    """Connects API process number `own` of `servers`, by sockets in `directory`."""
    context = zmq.Context()
    receive = context.socket(zmq.PULL)
    receive.set_hwm(0)
    receive.bind(f"ipc://{directory}/peer_{own}")
    send = {server: context.socket(zmq.PUSH) for server in range(servers) if server != own}
    for server, socket in send.items():
        socket.set_hwm(0)
        socket.connect(f"ipc://{directory}/peer_{server}")
    peers = Peers(own, receive, send)
    try:
        yield peers
    finally:
        peers.stop()
        context.destroy(linger=200)  # milliseconds, for a last Stop to leave
