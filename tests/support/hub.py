"""A server with the part of the Hugging Face Hub's API that downloads use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    url: str
    downloaded: list[str] = field(default_factory=list)  # file names


@contextlib.contextmanager
def hub(name: str, folder: Path) -> Iterator[Hub]:
    """Serves one public model, `name`, with the files in `folder` and the revisions main and v2."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            info = [
                f"/api/models/{name}/revision/{revision}" for revision in ("main", "v2", COMMIT)
            ]
            file = path.removeprefix(f"/{name}/resolve/{COMMIT}/")
            if path in info:
                siblings = [{"rfilename": file} for file in files]
                self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}))
            elif path == f"/api/models/{name}/tree/{COMMIT}":
                entries = [_entry(file, content) for file, content in files.items()]
                self._send(200, json.dumps(entries))
            elif path.startswith(f"/api/models/{name}/revision/"):
                self._send(404, "{}", {"X-Error-Code": "RevisionNotFound"})
            elif file in files:
                if self.command == "GET":
                    served.downloaded.append(file)
                tag = _entry(file, files[file])["oid"]
                self._send(200, files[file], {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
            else:
                self._send(401, "{}", {"X-Error-Code": "RepoNotFound"})

        def _send(
            self, status: int, body: str | bytes, headers: dict[str, str] | None = None
        ) -> None:
            content = body.encode() if isinstance(body, str) else body
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Hub(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def _entry(file: str, content: bytes) -> dict[str, Any]:
    """Returns a file of a listing. `oid`: its hash as a git blob."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return {"type": "file", "path": file, "size": len(content), "oid": blob.hexdigest()}
