"""Starts the project's processes for a test, and ends all of them after it.

Each starts as a user would start it. Its output goes to a file, which is shown if the test fails.
"""

from __future__ import annotations

import contextlib
import itertools
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from support.procfs import Pid, descendants

Flag = str | int | float | bool | Path | None

ROOT = Path(__file__).resolve().parents[2]
# Time limit for an awaited event. It is long, because the machine may be busy.
EVENT_TIMEOUT_S = 90.0
# The router's limits that find hanging workers. In these tests no worker hangs, but any process
# may wait for seconds. Dead workers are found at once by their closed connections.
LONG_ROUTER_TIMEOUTS: dict[str, Flag] = {
    "health_check_timeout_secs": 60,
    "first_token_timeout_secs": 300,
    "inter_token_timeout_secs": 300,
}
REPLAY_KEY = "shared-by-routers-and-workers-of-tests"
PORTS = range(20_000, 30_000)  # below the system's range for outgoing connections
PORTS_OF_A_RUN = 500
PORT_STEP = 5  # the workers of a launcher use the ports from its base port on

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], what: str, every_s: float = 0.05) -> T:
    """Returns the first true value of `condition`, which is called every `every_s` seconds."""
    deadline = time.monotonic() + EVENT_TIMEOUT_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {EVENT_TIMEOUT_S:g} s")
        time.sleep(every_s)
    return value


def get_json(url: str, key: str = "") -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=EVENT_TIMEOUT_S) as response:
        return json.load(response)


def post_json(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=EVENT_TIMEOUT_S) as response:
        text = response.read()
    return json.loads(text) if text else None


def status_of(url: str, timeout: float = EVENT_TIMEOUT_S) -> int:
    """Returns the HTTP status of a GET; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@cache
def _own_ports() -> tuple[Iterator[int], socket.socket]:
    """Returns an endless iterator over ports that no other run of tests on this machine uses, and the claim to them: an
    abstract Unix socket, which the kernel closes at the end of this process."""
    starts = list(PORTS[::PORTS_OF_A_RUN])
    random.SystemRandom().shuffle(starts)
    for start in starts:
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            claim.bind(f"\0mla-router-test-ports-{start}")
            return itertools.cycle(range(start, start + PORTS_OF_A_RUN, PORT_STEP)), claim
        claim.close()
    raise RuntimeError(f"{len(starts)} other runs of tests have all ports from {PORTS[0]} on")


def free_ports(count: int) -> list[int]:
    """Returns free ports that are not returned again for some time: a test listens on its port only
    seconds later, and again after a restart."""
    ports: list[int] = []
    turns, _ = _own_ports()
    while len(ports) < count:
        port = next(turns)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def to_argv(flags: dict[str, Flag]) -> list[str]:
    """Returns `page_size=1, disable_radix_cache=True` as `--page-size=1 --disable-radix-cache`."""
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
    """A started program that serves at `url`."""

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
        """Returns all living descendants. Keeps them, so that `stop` finds processes that lost their parent."""
        found = descendants(self.pid)
        self.seen.update(found)
        return found

    def survivors(self) -> list[Pid]:
        self.tree()
        return [pid for pid in self.seen if pid.alive]

    def wait_ready(self, path: str) -> None:
        def ready() -> bool:
            self.tree()
            if self.process.poll() is not None:
                raise RuntimeError(f"exited with {self.process.returncode} before it was ready")
            return status_of(self.url + path) == 200

        # A start takes seconds; a question costs 6 ms of CPU time.
        wait_until(ready, f"{self.url}{path} answers 200", every_s=0.25)

    def stop(self) -> None:
        """Ends the whole tree: by SIGINT, then by SIGKILL."""
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
def running(
    argv: list[str], url: str, ready_path: str | None, prefix: Sequence[str] = ()
) -> Iterator[Running]:
    """Starts `python <argv>`, with the words of `prefix` before it, and waits for a 200 from `ready_path`."""
    # One thread each: several torch processes share the few cores of a CI machine.
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "python"),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    if REPLAY_KEY:
        environment["MLA_ROUTER_REPLAY_KEY"] = REPLAY_KEY
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mla-test-")))
        log = folder / "output.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                # A separate process group: signals to it reach the same processes as from a terminal, but not the tests.
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
    """Starts one worker without a router."""
    (port,) = free_ports(1)
    values = {"model_path": model_path, "port": port, "device": "cpu", "cpu_threads": 1} | flags
    argv = ["-m", "mla_router.launch_worker", *to_argv(values)]
    with running(argv, f"http://127.0.0.1:{port}", "/health") as started:
        yield started


@contextlib.contextmanager
def server(dp_size: int = 2, model_path: Path | None = None, **flags: Flag) -> Iterator[Running]:
    """Starts a router and `dp_size` workers, and waits until every worker is in rotation."""
    port, base_port = free_ports(2)
    values = {
        "model_path": model_path,
        "dp_size": dp_size,
        "port": port,
        "router_dp_worker_base_port": base_port,
        "device": "cpu",
        "cpu_threads": 1,
        **{f"router_{name}": value for name, value in LONG_ROUTER_TIMEOUTS.items()},
    } | flags
    argv = ["-m", "mla_router.launch_server", *to_argv(values)]
    with running(argv, f"http://127.0.0.1:{port}", "/readiness") as started:
        wait_until(
            lambda: len(healthy_workers(started.url)) == dp_size, f"{dp_size} workers in rotation"
        )
        started.tree()
        yield started


@contextlib.contextmanager
def node(prefix: Sequence[str] = (), **flags: Flag) -> Iterator[Running]:
    """Starts the launcher of a node other than 0, and does not wait."""
    argv = ["-m", "mla_router.launch_server", *to_argv({"device": "cpu", "cpu_threads": 1} | flags)]
    with running(argv, "", None, prefix) as started:
        yield started


@contextlib.contextmanager
def router(worker_urls: list[str], **flags: Flag) -> Iterator[Running]:
    """Starts a router in front of running workers."""
    (port,) = free_ports(1)
    argv = [
        "-m",
        "mla_router.launch_router",
        *to_argv({"port": port} | LONG_ROUTER_TIMEOUTS | flags),
    ]
    argv += ["--worker-urls", *worker_urls]
    with running(argv, f"http://127.0.0.1:{port}", "/readiness") as started:
        yield started


@contextlib.contextmanager
def together(
    *starts: contextlib.AbstractContextManager[Running],
) -> Iterator[list[Running]]:
    """Starts several programs at the same time, so that they load in parallel."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield list(pool.map(stack.enter_context, starts))


def workers(url: str, key: str = "") -> list[dict[str, Any]]:
    """Returns the router's list of workers."""
    answer: dict[str, list[dict[str, Any]]] = get_json(url + "/workers", key)
    return answer["workers"]


def healthy_workers(url: str, key: str = "") -> list[dict[str, Any]]:
    return [entry for entry in workers(url, key) if entry["healthy"]]
