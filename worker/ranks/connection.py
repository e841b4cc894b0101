"""Notices the end of a ZMQ connection on the side that made it: ZMQ itself reports it to neither end."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message


def watch(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Lets `socket` connect once and not again. Returns a socket that is readable when the connection has ended, or was
    refused. Call it before `connect`. The side that listens cannot be watched so: strangers come and go there."""
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    return socket.get_monitor_socket(
        zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )


def describe_end(events: zmq.Socket[bytes]) -> str:
    """Returns `has ended (DISCONNECTED)`. `events`: the readable socket of `watch`."""
    return f"has ended ({zmq.Event(recv_monitor_message(events)['event']).name})"
