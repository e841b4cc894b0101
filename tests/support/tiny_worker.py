"""A minimal worker from the standard library, which a router finds healthy."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.processes import EVENT_TIMEOUT_S


@dataclass
class TinyWorker:
    """Answers a completion with its port and the received body, once `may_answer` is set."""

    url: str
    bodies: list[bytes] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    may_answer: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def tiny_worker() -> Iterator[TinyWorker]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"boot_id": "first", "max_total_num_tokens": 4096})

        def do_POST(self) -> None:
            worker.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            worker.asked.set()
            worker.may_answer.wait(timeout=EVENT_TIMEOUT_S)
            self._answer({"choices": [], "from": worker.url})

        def _answer(self, body: dict[str, object]) -> None:
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            del format, args  # no access log

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    worker = TinyWorker(f"http://127.0.0.1:{server.server_port}")
    worker.may_answer.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield worker
    finally:
        worker.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()
