"""The CPU time of a worker's processes for each request and each token.

    python bench/serving/server_overhead.py --out bench/results/server_overhead.jsonl

It runs a real server, a real scheduler, an engine that computes nothing (null_worker.py), and a client that counts
events without parsing them. The engine's steps are so long that each token is one event; `tokens_an_event` shows
whether the machine could keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from support import processes

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
TIMEOUT_S = 500.0


def cpu_seconds(pids: Sequence[int]) -> float:
    """Returns the user and system time of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_A_SECOND


PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
WORDS = "What is the largest of these numbers, and why? "


def body_of(path: str, prompt: str, tokens: int) -> dict[str, Any]:
    if path == "/generate":
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        return {"text": prompt, "sampling_params": sampling, "stream": True}
    common = {"model": "small", "ignore_eos": True, "max_tokens": tokens, "stream": True}
    if path == "/v1/completions":
        return common | {"prompt": prompt}
    return common | {"messages": [{"role": "user", "content": prompt}]}


@dataclass
class Heard:
    events: int = 0
    size: int = 0
    done: int = 0  # streams that ended with [DONE], which also counts as an event


class Counter(asyncio.Protocol):
    """Sends one request and counts the events of its answer."""

    def __init__(self, request: bytes, heard: Heard) -> None:
        self._request = request
        self._heard = heard
        self._tail = b""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard.size += len(data)
        self._heard.events += data.count(b"\ndata: ")  # at the beginning of a line
        self._tail = (self._tail + data)[-64:]
        if b"data: [DONE]" in self._tail:
            self._heard.done += 1
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


async def drive(port: int, path: str, streams: int, prompt_chars: int, tokens: int) -> Heard:
    loop, heard = asyncio.get_running_loop(), Heard()
    waiting = []
    for stream in range(streams):
        prompt = f"{stream} {WORDS * (prompt_chars // len(WORDS))}"
        body = json.dumps(body_of(path, prompt, tokens)).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        client = Counter(head.encode() + body, heard)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
        waiting.append(client.finished)
    await asyncio.wait_for(asyncio.gather(*waiting), TIMEOUT_S)
    return heard


@dataclass
class Worker:
    port: int
    pids: tuple[list[int], list[int]]  # of the API processes, and of the scheduler

    def spend(
        self, path: str, streams: int, prompt_chars: int, tokens: int
    ) -> tuple[list[float], Heard]:
        """Returns the CPU seconds of the API processes and the scheduler for parallel streams."""
        before = [cpu_seconds(pids) for pids in self.pids]
        heard = asyncio.run(drive(self.port, path, streams, prompt_chars, tokens))
        assert heard.done == streams, f"{heard.done} of {streams} streams have ended well"
        after = [cpu_seconds(pids) for pids in self.pids]
        return [end - begin for end, begin in zip(after, before, strict=True)], heard


def measure(
    worker: Worker, path: str, streams: int, prompt_chars: int, tokens: int
) -> dict[str, Any]:
    """Measures the cost of a request with one token, and of each further token."""
    worker.spend(path, 8, prompt_chars, 8)  # warm-up
    short, _ = worker.spend(path, streams, prompt_chars, 1)
    long, heard = worker.spend(path, streams, prompt_chars, tokens)
    further = streams * (tokens - 1)
    result: dict[str, Any] = {"path": path}
    for name, a, b in zip(("server", "scheduler"), short, long, strict=True):
        result[name] = {
            "us_a_request": round(a / streams * 1e6),
            "us_a_token": round((b - a) / further * 1e6, 1),
        }
    return result | {
        "tokens_an_event": round(streams * tokens / (heard.events - heard.done), 2),
        "bytes_a_token": round(heard.size / (streams * tokens)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--prompt-chars", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=120.0)
    parser.add_argument("--servers", type=int, default=1, help="server processes of the worker")
    parser.add_argument("--path", nargs="+", default=PATHS, choices=PATHS)
    parser.add_argument("--out", type=Path, help="append the line to this file")
    args = parser.parse_args()
    sizes = {
        "streams": args.streams,
        "prompt_chars": args.prompt_chars,
        "tokens": args.tokens,
    }
    (port,) = processes.free_ports(1)
    flags = {
        "port": port,
        "max_running_requests": args.streams,
        "served_model_name": "small",
        "tokenizer_worker_num": args.servers,
    }
    argv = [
        str(ROOT / "bench/serving/null_worker.py"),
        str(args.step_ms),
        *processes.to_argv(flags),
    ]
    lines = []
    with processes.running(argv, f"http://127.0.0.1:{port}", "/health") as running:
        tree = running.tree()
        servers = [child.number for child in tree if "mla_router server" in child.command]
        (scheduler,) = [child.number for child in tree if child.number not in servers]
        worker = Worker(port, ([running.pid, *servers], [scheduler]))
        for path in args.path:
            lines.append(measure(worker, path, **sizes))
            print(lines[-1], flush=True)
    record(
        "server_overhead",
        {
            "config": sizes | {"step_ms": args.step_ms, "servers": args.servers},
            # The load of the machine: shared caches and cores change CPU time, too.
            "load_average": round(os.getloadavg()[0], 1),
            "paths": lines,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
