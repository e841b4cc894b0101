"""A fake worker process. It starts at once, and files in a folder control it.

    python fake_worker.py PORT FOLDER PARENT

It ends with process PARENT. Files in FOLDER: `exit_code` makes it exit with this status before it listens. A streamed
completion sends one chunk and waits for `finish`; with `silent` it waits before the first chunk. `deaf` makes it ignore
SIGTERM. `starts` gets a line with the process id at each start. Completions need the key of MLA_ROUTER_API_KEY.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mla_router.worker.child import die_with_parent

CHUNKS = [
    b'data: {"choices": [], "n": 1}\n\n',
    b'data: {"choices": [], "n": 2}\n\n',
    b"data: [DONE]\n\n",
]
BOOT_ID = uuid.uuid4().hex
KEY = os.environ.get("MLA_ROUTER_API_KEY")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        info = {"boot_id": BOOT_ID, "max_total_num_tokens": 4096, "page_size": 16}
        body = json.dumps(info if self.path == "/get_server_info" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if KEY and self.headers["Authorization"] != f"Bearer {KEY}":
            self.send_error(401)
            return
        if (self.folder / "silent").exists():
            (self.folder / "asked").touch()
            self._until_finish()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(CHUNKS[0])
        self._until_finish()
        for chunk in CHUNKS[1:]:
            self._chunk(chunk)
        self._chunk(b"")

    def _until_finish(self) -> None:
        while not (self.folder / "finish").exists():
            time.sleep(0.02)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignores clients that leave."""


def main() -> int:
    die_with_parent(int(sys.argv[3]))
    port, Handler.folder = int(sys.argv[1]), Path(sys.argv[2])
    with (Handler.folder / "starts").open("a") as starts:
        starts.write(f"{port}\n")
    exit_code = Handler.folder / "exit_code"
    if exit_code.exists():
        print("cannot work like this")
        return int(exit_code.read_text())
    if (Handler.folder / "deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A separate process, such as the scheduler of a real worker. It must end with the worker.
    scheduler = __file__.replace("fake_worker", "fake_scheduler")
    subprocess.Popen([sys.executable, scheduler, str(os.getpid())])
    with Server(("127.0.0.1", port), Handler) as server:
        print(f"fake worker on port {port}")
        server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
