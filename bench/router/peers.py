"""The other routers of the comparison, at pinned versions and with their defaults.

Each Python package is installed from PyPI into its own virtual environment. nginx is the system's
(`apt install nginx-light`).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import ROOT

RELEASE = ROOT / "target" / "release"
READY_TIMEOUT = 120.0
CHAT = "/v1/chat/completions"
PROBE = b'{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":1}'

NGINX = """
daemon off; worker_processes 2; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off; client_max_body_size 512m; client_body_buffer_size 1m;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    upstream workers {{ {servers} keepalive 256; }}
    server {{
        listen 127.0.0.1:{port}; keepalive_requests 1000000000;
        location / {{
            proxy_pass http://workers; proxy_http_version 1.1;
            proxy_set_header Connection ""; proxy_buffering off;
        }}
    }}
}}
"""

# Modules, and flags that reduce the log. The metrics port is fixed by
# default; two routers on one machine need two.
METRICS_PORT = "--prometheus-port"
MODULES = {
    "sglang-router==0.3.2": ("sglang_router.launch_router", "--log-level", "warn", METRICS_PORT),
    "sglang-router==0.1.0": ("sglang_router.launch_router",),
    "smg==1.13.0": ("smg.launch_router", "--log-level", "warn", METRICS_PORT),
    "vllm-router==0.1.17": ("vllm_router.launch_router", "--log-level", "warning", METRICS_PORT),
}
PEERS = tuple(MODULES)


@dataclass(frozen=True)
class System:
    """A router under test: its name, and its command for given workers."""

    name: str
    command: Callable[[int, Sequence[str]], list[str]]


def ours(policy: str, *flags: str, binary: Path = RELEASE / "mla-router") -> System:
    def command(port: int, workers: Sequence[str]) -> list[str]:
        fixed = ["--port", str(port), "--policy", policy, "--log-level", "error"]
        return [str(binary), *fixed, *flags, "--worker-urls", *workers]

    return System(f"mla-router {policy}", command)


def nginx(folder: Path) -> System | None:
    """Returns nginx with round robin over kept connections; None if it is not installed."""
    binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None:
        return None

    def command(port: int, workers: Sequence[str]) -> list[str]:
        own = folder / f"nginx-{port}"
        own.mkdir()
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in workers)
        config = own / "nginx.conf"
        config.write_text(NGINX.format(folder=own, servers=servers, port=port))
        return [binary, "-e", f"{own}/error.log", "-c", str(config)]

    return System("nginx", command)


def peer(package: str, folder: Path, *flags: str) -> System:
    """Returns a router from PyPI, which is installed under `folder` if it is missing."""
    module, *fixed = MODULES[package]
    python = folder / package.replace("==", "-") / "bin" / "python"
    if not python.exists():
        print(f"installing {package} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, package, "setuptools"], check=True)

    def command(port: int, workers: Sequence[str]) -> list[str]:
        words = [str(python), "-m", module, "--host", "127.0.0.1", "--port", str(port), *flags]
        for flag in fixed:
            words += [flag, str(free_port())] if flag == METRICS_PORT else [flag]
        return [*words, "--worker-urls", *workers]

    return System(package.replace("==", " "), command)


def free_port(count: int = 1) -> int:
    """Returns the first of `count` free ports in a row, below the kernel's range of client ports."""
    while True:
        first = random.randrange(15000, 32000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first


@contextlib.contextmanager
def running(command: Sequence[str | Path], log: Path | None = None) -> Iterator[int]:
    """Runs a process within the block, and kills it with its children at the end. Yields its id."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else subprocess.DEVNULL
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until_ready(port: int, workers: Sequence[str] = (), path: str = CHAT) -> None:
    """Waits until requests are answered and all listed workers are in rotation. Raises TimeoutError."""
    deadline = time.monotonic() + READY_TIMEOUT
    url = f"http://127.0.0.1:{port}"
    while not _answers(url + path) or not all(_knows(url, worker) for worker in workers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"port {port} is not ready")
        time.sleep(0.1)


def _answers(url: str) -> bool:
    request = urllib.request.Request(url, PROBE, {"Content-Type": "application/json"})
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def _knows(url: str, worker: str) -> bool:
    """Whether the list of workers names it. Who has no list had all of them before it listened."""
    try:
        with urllib.request.urlopen(url + "/workers", timeout=5) as answer:
            return worker.encode() in answer.read()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """Returns the user and system time of a process group so far, in seconds."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == pid:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
