"""The whole launcher, with the real router and fake workers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mla_router.launch import server
from mla_router.worker.config import ConfigError
from support.processes import (
    LONG_ROUTER_TIMEOUTS,
    ROOT,
    Running,
    free_ports,
    healthy_workers,
    running,
    status_of,
    to_argv,
    wait_until,
)
from support.procfs import ignored_signals, listener

FAKE_LAUNCHER = Path(__file__).with_name("fake_launcher.py")
TWO = 2
LONG_TIMEOUTS = to_argv({f"router_{name}": value for name, value in LONG_ROUTER_TIMEOUTS.items()})
ENDLESS_DRAIN = "--router-shutdown-grace-period-secs=3600"


@contextlib.contextmanager
def launched(folder: Path, *flags: str, prefix: Sequence[str] = ()) -> Iterator[Running]:
    """A launcher with two fake workers in rotation. Their files are in `folder`. `prefix`: words before its command."""
    (port,) = free_ports(1)
    argv = [
        str(FAKE_LAUNCHER),
        str(folder),
        f"--dp-size={TWO}",
        f"--port={port}",
        *LONG_TIMEOUTS,
        *flags,
    ]
    with running(argv, f"http://127.0.0.1:{port}", None, prefix) as launcher:
        wait_until(lambda: "Ctrl-C stops" in launcher.output(), "the launcher is ready")
        assert len(launcher.tree()) == 2 * TWO  # each worker and its scheduler
        yield launcher


def leave(*argv: str) -> subprocess.CompletedProcess[str]:
    """Runs the real `launch_server` until it ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "mla_router.launch_server", *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        check=False,
        capture_output=True,
        text=True,
    )


def gone(launcher: Running) -> None:
    assert wait_until(lambda: not launcher.survivors(), "no process is left")


class Stream:
    """Streams a completion through the router and yields its pieces."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = '{"model": "m", "prompt": "p", "stream": true}'
        self._connection.request(
            "POST", "/v1/completions", body, {"Content-Type": "application/json"}
        )
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self.first = self._response.readline()

    def rest(self) -> bytes:
        with contextlib.closing(self._connection):
            return self._response.read()


def test_the_last_lines_name_the_running_processes(tmp_path: Path) -> None:
    with launched(tmp_path, "--router-policy=round_robin") as launcher:
        text = launcher.output()
        assert f"Ready: {launcher.url}\n" in text
        assert "round_robin" in text
        assert len(healthy_workers(launcher.url)) == TWO
        for worker in healthy_workers(launcher.url):
            assert worker["url"] in text
        assert text.count(f"curl {launcher.url}/v1/chat/completions") == 1
        assert text.count(f"curl -N {launcher.url}/v1/chat/completions") == 1


def test_workers_have_the_key_that_the_router_sends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_ROUTER_API_KEY", "sesame")
    monkeypatch.setenv("MLA_ROUTER_WORKER_API_KEY", "oats")
    (tmp_path / "finish").touch()
    with launched(tmp_path) as launcher:
        worker = healthy_workers(launcher.url, key="sesame")[0]["url"]
        asked = [
            (launcher.url, "sesame"),
            (launcher.url, "oats"),
            (worker, "oats"),
            (worker, "sesame"),
        ]
        assert [status(url, key) for url, key in asked] == [200, 401, 200, 401]


def status(url: str, key: str) -> int:
    """Returns the status of a streamed completion."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", '{"prompt": "p", "stream": true}', headers)
        return connection.getresponse().status


def test_ctrl_c_ends_workers_that_ignore_sigterm(tmp_path: Path) -> None:
    (tmp_path / "deaf").touch()
    with launched(tmp_path, ENDLESS_DRAIN) as launcher:
        stream = Stream(launcher.url)
        launcher.process.send_signal(signal.SIGINT)
        # The limit is five seconds; a busy machine needs more.
        assert launcher.process.wait(timeout=40) == 0
        gone(launcher)
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert b"[DONE]" not in stream.rest()


def test_ctrl_c_stops_everything_at_once(tmp_path: Path) -> None:
    """A request that does not end by itself is running."""
    with launched(tmp_path) as launcher:
        stream = Stream(launcher.url)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.wait() == 0
        gone(launcher)
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert b"[DONE]" not in stream.rest()
        assert "Traceback" not in launcher.output()


def test_ctrl_c_answers_open_requests(tmp_path: Path) -> None:
    (tmp_path / "silent").touch()
    with launched(tmp_path) as launcher:
        connection = http.client.HTTPConnection(launcher.url.removeprefix("http://"))
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", '{"prompt": "p"}', headers)
            wait_until((tmp_path / "asked").exists, "a worker has it")
            launcher.process.send_signal(signal.SIGINT)
            answer = connection.getresponse()
            assert answer.status == 503
            assert json.load(answer)["error"]["code"] == "draining"
        assert launcher.process.wait() == 0
        gone(launcher)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_a_drain(times: int, tmp_path: Path) -> None:
    """One Ctrl-C stops. A second one kills at once."""
    with launched(tmp_path, ENDLESS_DRAIN) as launcher:
        stream = Stream(launcher.url)
        launcher.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in launcher.output(), "it drains")
        for _ in range(times):
            launcher.process.send_signal(signal.SIGINT)
        # Two consecutive signals may arrive as one. The second one may also come when all is stopped and Python ends: it
        # ends the process then, for which a shell reports 130 as well.
        assert launcher.process.wait() in {1: {0}, 2: {0, 130, -signal.SIGINT}}[times]
        gone(launcher)
        assert stream.first == b'data: {"choices": [], "n": 1}\n'


def test_a_second_sigterm_ends_a_drain(tmp_path: Path) -> None:
    with launched(tmp_path, ENDLESS_DRAIN) as launcher:
        stream = Stream(launcher.url)
        launcher.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in launcher.output(), "it drains")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.process.wait() == 0
        gone(launcher)
        assert stream.first == b'data: {"choices": [], "n": 1}\n'


def test_sigterm_lets_a_running_stream_finish(tmp_path: Path) -> None:
    with launched(tmp_path, ENDLESS_DRAIN) as launcher:
        stream = Stream(launcher.url)
        assert stream.first == b'data: {"choices": [], "n": 1}\n'
        launcher.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(launcher.url + "/readiness") != 200, "it drains")
        assert launcher.process.poll() is None
        (tmp_path / "finish").touch()
        assert stream.rest() == b'\ndata: {"choices": [], "n": 2}\n\ndata: [DONE]\n\n'
        assert launcher.process.wait() == 0
        gone(launcher)


def test_a_closed_terminal_lets_a_running_stream_finish(tmp_path: Path) -> None:
    """It sends SIGHUP, perhaps several times."""
    with launched(tmp_path, ENDLESS_DRAIN) as launcher:
        stream = Stream(launcher.url)
        launcher.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "draining" in launcher.output(), "it drains")
        launcher.process.send_signal(signal.SIGHUP)
        (tmp_path / "finish").touch()
        assert stream.rest().endswith(b"data: [DONE]\n\n")
        assert launcher.process.wait() == 0
        gone(launcher)


def test_nohup_is_for_the_launcher_and_its_workers(tmp_path: Path) -> None:
    with launched(tmp_path, prefix=["nohup"]) as launcher:
        for number in [launcher.pid, *(child.number for child in launcher.tree())]:
            assert signal.SIGHUP in ignored_signals(number)


def test_kill_9_of_the_launcher_leaves_no_process(tmp_path: Path) -> None:
    with launched(tmp_path) as launcher:
        launcher.process.kill()
        gone(launcher)


def test_a_killed_worker_returns_to_rotation(tmp_path: Path) -> None:
    with launched(tmp_path) as launcher:
        url = healthy_workers(launcher.url)[0]["url"]
        port = int(url.rpartition(":")[2])
        victim = listener(port)
        scheduler = next(pid for pid in launcher.tree() if pid.parent == victim)
        os.kill(victim, signal.SIGKILL)

        def replaced() -> bool:
            with contextlib.suppress(ProcessLookupError):
                return listener(port) != victim
            return False

        wait_until(replaced, "another process on the same port")
        wait_until(lambda: len(healthy_workers(launcher.url)) == TWO, "both are in rotation")
        assert not scheduler.alive
        assert launcher.process.poll() is None


def test_a_worker_that_cannot_start_ends_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "exit_code").write_text("1")
    (port,) = free_ports(1)
    ended = subprocess.run(
        [sys.executable, str(FAKE_LAUNCHER), str(tmp_path), f"--port={port}"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "[worker 0] cannot work like this" in ended.stdout
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "worker 0 exited with code 1 before it was ready, 3 times" in errors[0]
    assert "Traceback" not in ended.stderr


def test_taken_worker_ports_are_skipped_and_logged(tmp_path: Path) -> None:
    (taken,) = free_ports(1)
    base = f"--router-dp-worker-base-port={taken}"
    with socket.create_server(("127.0.0.1", taken)), launched(tmp_path, base) as launcher:
        assert f", not {taken}: ports are taken" in launcher.output()
        assert taken not in {
            int(worker["url"].rpartition(":")[2]) for worker in healthy_workers(launcher.url)
        }


def test_a_taken_port_is_one_line_and_no_worker_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = leave("--port", str(port))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert str(port) in ended.stderr


@pytest.mark.parametrize(
    ("argv", "mention"),
    [
        (["--host", "0.0.0.0", "--port", "0"], "set --api-key"),
        (["--tls-cert-path", "/no/c", "--tls-key-path", "/no/k"], "/no/c"),
    ],
)
def test_a_router_that_does_not_start_is_one_line(argv: list[str], mention: str) -> None:
    ended = leave(*argv)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert mention in ended.stderr


@pytest.mark.parametrize(
    ("argv", "mention"),
    [
        (["--model-path", "/no/such/folder"], "--model-path /no/such/folder: no such folder"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--page-size", "many"], "--page-size"),
        (["--router-policy", "magic"], "--router-policy"),
        (["--router-request-timeout-secs", "0"], "--router-request-timeout-secs"),
        (["--router-allowed-hosts", "\udcff"], "a flag of the router has bytes that are not UTF-8"),
    ],
)
def test_bad_flags_are_one_line(argv: list[str], mention: str) -> None:
    ended = leave(*argv)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert mention in ended.stderr


@pytest.mark.parametrize(
    ("at", "error", "status", "printed"),
    [
        ("locate", KeyboardInterrupt(), 130, ""),  # during a download
        ("_serve_node", ConfigError("no interface has it"), 2, "error: no interface has it\n"),
    ],
)
def test_an_end_outside_of_serving_is_no_traceback(
    at: str,
    error: BaseException,
    status: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def end(*_: object) -> None:
        raise error

    monkeypatch.setattr(server, at, end)
    monkeypatch.setenv("MLA_ROUTER_DIST_KEY", "a secret of the nodes")
    nodes = ["--tp-size=2", "--nnodes=2", "--node-rank=1", "--dist-init-addr=127.0.0.1:5000"]
    assert server.run([*nodes, "--device=cpu"]) == status
    assert capsys.readouterr().err == printed
