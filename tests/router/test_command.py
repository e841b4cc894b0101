"""The `mla-router` command (`run_cli`) as a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from support.processes import (
    EVENT_TIMEOUT_S,
    LONG_ROUTER_TIMEOUTS,
    ROOT,
    free_ports,
    post_json,
    status_of,
    to_argv,
    wait_until,
)
from support.tiny_worker import tiny_worker

RUN_CLI = "import sys; from mla_router._router import run_cli; sys.exit(run_cli(sys.argv[1:]))"


@contextmanager
def command(*argv: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_CLI, *argv],
        env={"PYTHONPATH": str(ROOT / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def listening(process: subprocess.Popen[str]) -> str:
    """Returns its URL, from its log line."""
    assert process.stderr
    for line in process.stderr:
        if found := re.search(r"listening on (http://\S+),", line):
            return found[1]
    raise AssertionError("it ended without listening")


def outcome(*argv: str) -> tuple[int, str, str]:
    with command(*argv) as process:
        stdout, stderr = process.communicate(timeout=EVENT_TIMEOUT_S)
        return process.returncode, stdout, stderr


def test_help_is_on_stdout() -> None:
    status, stdout, stderr = outcome("--help")
    assert (status, stderr) == (0, "")
    assert "--worker-urls" in stdout and "127.0.0.1" in stdout


def test_a_bad_flag_is_named() -> None:
    for argv, named in ((["--prot=1"], "--prot"), (["--port=x"], "--port")):
        status, stdout, stderr = outcome(*argv)
        assert (status, stdout) == (2, "")
        assert named in stderr and "Traceback" not in stderr


def test_a_taken_port_is_one_line() -> None:
    with command("--port=0") as first:
        port = listening(first).rsplit(":", 1)[1]
        status, _, stderr = outcome(f"--port={port}")
        assert status == 1
        assert f"127.0.0.1:{port}" in stderr and len(stderr.splitlines()) == 1


def test_ctrl_c_stops_it_quietly() -> None:
    with command("--port=0") as process:
        url = listening(process)
        assert status_of(f"{url}/liveness") == 200
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=EVENT_TIMEOUT_S)
        assert process.returncode == 0
        assert "Traceback" not in stderr


def test_sigterm_drains() -> None:
    with tiny_worker() as worker, ThreadPoolExecutor() as threads:
        urls = [f"--worker-urls={worker.url}", f"--worker-urls=http://127.0.0.1:{free_ports(1)[0]}"]
        flags = {"port": 0, "health_check_interval_secs": 0.05, "shutdown_grace_period_secs": 600}
        with command(*to_argv(flags | LONG_ROUTER_TIMEOUTS), *urls) as process:
            url = listening(process)
            wait_until(lambda: status_of(f"{url}/readiness") == 200, "a healthy worker")
            worker.may_answer.clear()
            body = {"model": "m", "prompt": "Hi"}
            answer = threads.submit(post_json, f"{url}/v1/completions", body)
            assert worker.asked.wait(EVENT_TIMEOUT_S)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: status_of(f"{url}/readiness") == 503, "draining")
            with pytest.raises(urllib.error.HTTPError, match="503"):
                post_json(f"{url}/v1/completions", body)
            worker.may_answer.set()
            assert answer.result(EVENT_TIMEOUT_S)["from"] == worker.url
            assert process.wait(EVENT_TIMEOUT_S) == 0
