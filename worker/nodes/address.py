"""The address and the network interface over which this machine reaches another one."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from mla_router.worker.config import ConfigError
from mla_router.worker.host import has_gpu

SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ADDRESS = slice(20, 24)  # of struct ifreq: name, family, port, address
RETRY_S = 0.5
HOST_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\[\]:]+)):(?P<port>\d{1,5})")


def host_port(text: str) -> tuple[str, int]:
    """Splits HOST:PORT or [IPv6]:PORT of --dist-init-addr. Raises ConfigError."""
    found = HOST_PORT.fullmatch(text)
    if not found or not 0 < (port := int(found["port"])) < 1 << 16:
        raise ConfigError(f"--dist-init-addr {text}: HOST:PORT, such as 10.0.0.1:5000")
    return found["v6"] or found["host"], port


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Returns the family and the first numeric address of `host`. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


async def resolve_in_time(
    host: str, port: int, timeout_s: float, warn: Callable[[str], None]
) -> tuple[socket.AddressFamily, str]:
    """Returns `resolve(host, port)`. Waits for a name that nobody knows yet, as that of a pod in its first seconds.

    `timeout_s`: the longest wait. `warn` gets the reason of the wait, once. Raises OSError.
    """
    deadline = time.monotonic() + timeout_s
    told = False
    while True:
        try:
            return await asyncio.to_thread(resolve, host, port)
        except socket.gaierror as error:
            if time.monotonic() + RETRY_S > deadline:
                raise
            if not told:
                warn(f"{host} (--dist-init-addr): {error.strerror}; trying again")
                told = True
        await asyncio.sleep(RETRY_S)


def own_address(host: str, port: int) -> str:
    """Returns the address of this machine on the way to `host`. Sends nothing. Raises OSError."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this address; None for a second address of an interface."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if number.is_loopback:
        return "lo"
    if number.version == 6:
        wanted = number.exploded.replace(":", "")
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.split()[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if answer[_ADDRESS] == number.packed:
                return name
    return None


def nccl_environment(address: str, device: str) -> dict[str, str]:
    """Returns the environment in which NCCL uses the interface of `address`. Raises ConfigError if its name is unknown
    and --device `device` is a GPU."""
    name = interface_of(address)
    if name is None and has_gpu(device):
        raise ConfigError(
            f"--dist-init-addr: no interface has {address} as its first address; name it in NCCL_SOCKET_IFNAME"
        )
    return {} if name is None else {"NCCL_SOCKET_IFNAME": name}
