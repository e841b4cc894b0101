"""For a client that does not read, the worker stores each token once, however long the client waits."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import get_json

TOKENS = 900
WINDOW = 4096  # bytes in the receive buffer of the client


async def ask(worker: FakeWorker, body: dict[str, Any]) -> tuple[asyncio.StreamReader, Any]:
    host, _, port = worker.url.removeprefix("http://").rpartition(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=raw, limit=WINDOW)
    text = json.dumps(body)
    head = (
        f"POST /generate HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    )
    writer.write(f"{head}\r\n\r\n{text}".encode())
    return reader, writer


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        (line,) = [line for line in status if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def test_missed_tokens_arrive_in_one_event() -> None:
    """Each event of this endpoint repeats all tokens so far, with 20 others beside each. All events would be about 250
    MB."""
    body = {
        "text": "a",
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True},
        "cache_salt": script(say=[70, 71, 72]),
    }

    async def visit(worker: FakeWorker) -> tuple[bytes, int]:
        reader, writer = await ask(worker, body)
        info_url = worker.url + "/get_server_info"
        before = resident_bytes(worker.running.pid)
        while True:
            stats = (await asyncio.to_thread(get_json, info_url))["scheduler"]
            if stats["generated_tokens"] == TOKENS and stats["running"] == 0:
                break
        grown = resident_bytes(worker.running.pid) - before
        answer = await reader.read()
        writer.close()
        return answer, grown

    with fake_worker() as worker:
        answer, grown = asyncio.run(visit(worker))
    *events, last, done = answer.split(b"data: ")[1:]
    assert done == b"[DONE]\n\n"
    meta = json.loads(last)["meta_info"]
    assert meta["completion_tokens"] == len(meta["output_top_logprobs"]) == TOKENS
    assert len(events) < TOKENS / 2, "it was told token by token, long after"
    assert grown < 64 << 20
