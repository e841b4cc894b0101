"""The project's real processes, started for a test and surely gone after it.

Each runs as a user would start it, with its output in a file that is shown when the test fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from support.procfs import Pid, descendants

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 120.0  # a start takes seconds; a loaded CI machine may take many

T = TypeVar("T")
Flag = str | int | float | bool | Path | None


def wait_until(condition: Callable[[], T | None], timeout: float, what: str) -> T:
    """The first true value of `condition`, which is asked again every 50 ms."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.05)
    return value


def get_json(url: str, timeout: float = 10.0) -> Any:
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return json.load(response)


def post_json(url: str, body: dict[str, Any], timeout: float = 60.0) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        text = response.read()
    return json.loads(text) if text else None


def status_of(url: str, timeout: float = 2.0) -> int:
    """HTTP status of a GET; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def free_ports(count: int) -> list[int]:
    """Ports that nobody has. Drawn from below those that the system gives to outgoing connections,
    lest one of them takes the port of a worker that is just being restarted."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports


def to_argv(flags: dict[str, Flag]) -> list[str]:
    """`page_size=1, disable_radix_cache=True` as `--page-size=1 --disable-radix-cache`."""
    argv = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not None and value is not False:
            argv.append(f"{flag}={value}")
    return argv


@dataclass
class Running:
    """A started program; `url` is where it serves."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    seen: set[Pid] = field(default_factory=set)

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tree(self) -> list[Pid]:
        """All living descendants; remembered, so that `stop` finds those who lost their parent."""
        found = descendants(self.pid)
        self.seen.update(found)
        return found

    def survivors(self) -> list[Pid]:
        self.tree()
        return [pid for pid in self.seen if pid.alive]

    def wait_ready(self, path: str, timeout: float = START_TIMEOUT) -> None:
        def ready() -> bool:
            self.tree()
            if self.process.poll() is not None:
                raise RuntimeError(f"exited with {self.process.returncode} before it was ready")
            return status_of(self.url + path) == 200

        wait_until(ready, timeout, f"{self.url}{path} answers 200")

    def stop(self) -> None:
        """End the whole tree, gently where it listens and by force where it does not."""
        self.tree()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=8.0)
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid.number, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(argv: list[str], url: str, ready_path: str | None) -> Iterator[Running]:
    """Start `python <argv>` and wait for a 200 from `ready_path`."""
    # One thread each: several torch processes share the few cores of a CI machine.
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "python"),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mla-test-")))
        log = folder / "output.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                # A group of its own: signals to it reach all that a terminal's would, and not us.
                start_new_session=True,
            )
        started = Running(process, url, log)
        stack.callback(started.stop)
        try:
            if ready_path is not None:
                started.wait_ready(ready_path)
            yield started
        except BaseException:
            print(f"\n--- {' '.join(argv)} ---\n{started.output()[-20_000:]}\n--- its end ---")
            raise


@contextlib.contextmanager
def worker(model_path: Path | None = None, **flags: Flag) -> Iterator[Running]:
    """One worker alone, from its own entry."""
    (port,) = free_ports(1)
    values = {"model_path": model_path, "port": port, "device": "cpu", "cpu_threads": 1} | flags
    argv = ["-m", "mla_router.launch_worker", *to_argv(values)]
    with running(argv, f"http://127.0.0.1:{port}", "/health") as started:
        yield started


@contextlib.contextmanager
def server(dp_size: int = 2, model_path: Path | None = None, **flags: Flag) -> Iterator[Running]:
    """Router and `dp_size` workers; ready when every worker is in rotation."""
    port, base_port = free_ports(2)
    values = {
        "model_path": model_path,
        "dp_size": dp_size,
        "port": port,
        "router_dp_worker_base_port": base_port,
        "device": "cpu",
        "cpu_threads": 1,
    } | flags
    argv = ["-m", "mla_router.launch_server", *to_argv(values)]
    with running(argv, f"http://127.0.0.1:{port}", "/readiness") as started:
        wait_until(
            lambda: len(healthy_workers(started.url)) == dp_size,
            START_TIMEOUT,
            f"{dp_size} workers in rotation",
        )
        started.tree()
        yield started


@contextlib.contextmanager
def router(worker_urls: list[str], **flags: Flag) -> Iterator[Running]:
    """The router alone, in front of workers that run already."""
    (port,) = free_ports(1)
    argv = ["-m", "mla_router.launch_router", *to_argv({"port": port} | flags)]
    argv += ["--worker-urls", *worker_urls]
    with running(argv, f"http://127.0.0.1:{port}", "/readiness") as started:
        yield started


@contextlib.contextmanager
def together(
    *starts: contextlib.AbstractContextManager[Running],
) -> Iterator[list[Running]]:
    """Several programs started at the same time: what they load, they load side by side."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield list(pool.map(stack.enter_context, starts))


def workers(url: str) -> list[dict[str, Any]]:
    """What the router says about its workers."""
    answer: dict[str, list[dict[str, Any]]] = get_json(url + "/workers")
    return answer["workers"]


def healthy_workers(url: str) -> list[dict[str, Any]]:
    return [entry for entry in workers(url) if entry["healthy"]]
