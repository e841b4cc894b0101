"""Lets only known keys connect to the CURVE sockets of a ZMQ context: a handler of ZMQ's authentication protocol (ZAP,
RFC 27).

pyzmq's own handler reads a request without a time limit after its poll. This one never waits for a request, so no
stranger can keep a start from ending it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import zmq
from zmq.utils import z85

from mla_router.worker.nodes.secret import equal

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_POLL_MS = 50


class Guard:
    """Answers in a thread, from the start to `stop`. After that nobody can connect."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: Mapping[str, Collection[bytes]]
    ) -> None:
        """`keys`: the public keys (Z85) that may connect, by the ZAP domain of a socket."""
        self._keys = {domain.encode(): tuple(own) for domain, own in keys.items()}
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ENDPOINT)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self._thread.start()

    def protect(self, socket: zmq.Socket[bytes], domain: str) -> None:
        """Makes `socket`, which is not bound yet, ask for each connection, and refuse all after `stop`."""
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            if self._socket.poll(_POLL_MS):
                self._answer()
        self._socket.close(linger=0)

    def _answer(self) -> None:
        try:
            _, request, domain, _, _, mechanism, *credentials = self._socket.recv_multipart(
                zmq.NOBLOCK
            )
        except zmq.Again:  # its connection has just ended
            return
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        known = any(equal(key, one) for one in self._keys.get(domain, ()))
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._socket.send_multipart([_VERSION, request, *status, b"", b""])
