"""Invalid or oversized HTTP: it is refused, and the connection is closed."""

from __future__ import annotations

import json
import re
import socket

import pytest

from support.fake_worker import FakeWorker
from support.processes import status_of

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"text": "a", "sampling_params": {"max_new_tokens": 1}}'


def talk(worker: FakeWorker, data: bytes) -> bytes:
    """Returns all bytes until the server closes the connection."""
    host, _, port = worker.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(data)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass  # the server closed without reading everything
        return answer


def statuses(answer: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,  # TLS
        b"\x00" * 1000,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX\x00Y: z\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1e3\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=lambda data: repr(data[:60]),
)
def test_malformed_requests(worker: FakeWorker, data: bytes) -> None:
    # One answer: the following bytes do not count as another request.
    answer = talk(worker, data)
    assert statuses(answer) == [b"400"]
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("Not a valid HTTP request: ")
    assert b"aiohttp" not in answer
    assert status_of(worker.url + "/health") == 200
    assert "Traceback" not in worker.running.output()


def test_a_head_that_the_router_accepts_is_read(worker: FakeWorker) -> None:
    """Gateways send tokens and cookies of more than 8 KiB."""
    for head in (b"GET /health?" + b"x" * 8100, b"GET /health"):
        fields = b"Host: x\r\nConnection: close\r\nCookie: " + b"x" * 50_000
        assert statuses(talk(worker, head + b" HTTP/1.1\r\n" + fields + b"\r\n\r\n")) == [b"200"]


@pytest.mark.parametrize(
    ("expected", "answers"), [(b"100-Continue", [b"100", b"200"]), (b"caf\xe9", [b"200"])]
)
def test_unknown_expectations_are_ignored(
    worker: FakeWorker, expected: bytes, answers: list[bytes]
) -> None:
    fields = b"Content-Type: application/json\r\nConnection: close\r\nExpect: " + expected
    length = b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    head = HEAD.replace(b"Host: x", b"Host: localhost")
    assert statuses(talk(worker, head + fields + length + BODY)) == answers


def test_a_broken_chunk_ends_the_request(worker: FakeWorker) -> None:
    head = HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert statuses(talk(worker, head + b"ZZ\r\n" + BODY + b"\r\n0\r\n\r\n")) == [b"400"]
    assert status_of(worker.url + "/health") == 200
    assert "Traceback" not in worker.running.output()
