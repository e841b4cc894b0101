"""The fork server and its supervisor: death, replacement, loading."""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_router.worker.grammar import pool, processes
from mla_router.worker.grammar.fork_server import STOPPED, _WorkerForks
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.pool import GrammarPool, start
from mla_router.worker.messages import Grammar
from support.grammar_driver import Refused, allowed, open_request, wait_for
from support.processes import wait_until
from support.procfs import descendants
from support.tiny_model import VOCAB_SIZE

FORK_SERVER_LOG = logging.getLogger("mla_router.worker.grammar.fork_server")
LETTERS = Grammar("regex", "[a-z]+!")
BOMB = "a?" * 5000 + "a" * 5000  # takes minutes to compile


@pytest.fixture
def own_grammars(tokenizer_folder: Path) -> Iterator[GrammarPool]:
    """A pool of its own, whose fork server may be killed."""
    options = GrammarOptions(tokenizer_folder=tokenizer_folder)  # as the scheduler gives it
    pool = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=8, options=options)
    yield pool
    pool.shut_down()


@pytest.fixture
def never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server that gets SIGSTOP counts as one that loads for long."""
    monkeypatch.setattr(processes, "STOPPED", "no state")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(pid: int, wait_for_end_of: int) -> None:
    """Kills `pid` and waits for the end of another process, after which its children end, too."""
    descriptor = os.pidfd_open(wait_for_end_of)
    os.kill(pid, signal.SIGKILL)
    assert select.select([descriptor], [], [], 30)[0], f"{wait_for_end_of} does not end"
    os.close(descriptor)


def test_a_killed_fork_server_loses_its_requests_and_is_replaced(own_grammars: GrammarPool) -> None:
    for _ in range(2):
        key = open_request(own_grammars, LETTERS)
        expected = allowed(own_grammars, key, [])
        fork_server = own_grammars.processes.fork_server.pid
        kill(fork_server, fork_server)
        with pytest.raises(Refused, match="lost the processes") as refused:
            allowed(own_grammars, key, [])
        assert not refused.value.problem.is_of_grammar
        key = open_request(own_grammars, LETTERS)
        assert allowed(own_grammars, key, []) == expected
        own_grammars.close(key)


@pytest.mark.parametrize("killed", ["fork server", "grammar worker"])
def test_a_request_of_a_compiled_grammar_gets_another_process(
    own_grammars: GrammarPool, killed: str
) -> None:
    """Its process has ended, as by the OOM killer, while no request used it. The new process gets the earlier output."""
    key = open_request(own_grammars, LETTERS)
    letter = allowed(own_grammars, key, [])[0]
    expected = allowed(own_grammars, key, [letter])
    own_grammars.close(key)
    (worker,) = descendants(own_grammars.processes.fork_server.pid)
    victim = own_grammars.processes.fork_server.pid if killed == "fork server" else worker.number
    kill(victim, worker.number)
    for _ in range(2):
        key = open_request(own_grammars, LETTERS, [letter])
        assert allowed(own_grammars, key, []) == expected
        own_grammars.close(key)


def test_a_lost_compilation_starts_again_once(own_grammars: GrammarPool) -> None:
    own_grammars.close(open_request(own_grammars, LETTERS))
    key = own_grammars.open(Grammar("regex", BOMB), [])
    for _ in range(2):
        wait_until_started(own_grammars)
        fork_server = own_grammars.processes.fork_server.pid
        compiler = descendants(fork_server)[-1]
        kill(fork_server, compiler.number)
    with pytest.raises(Refused, match="lost the processes") as refused:
        wait_for(own_grammars, key)
    assert not refused.value.problem.is_of_grammar


@pytest.mark.usefixtures("never_stopped")
def test_a_fork_server_that_does_not_read_blocks_nobody(own_grammars: GrammarPool) -> None:
    """It may load for a minute, and its socket holds some hundred orders. Each client leaves at once."""
    wait_until(lambda: own_grammars.processes.fork_server.pid, "it begins")
    os.kill(own_grammars.processes.fork_server.pid, signal.SIGSTOP)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the scheduler waits"))
    signal.alarm(30)
    try:
        for number in range(1000):
            own_grammars.close(own_grammars.open(Grammar("regex", f"{number}"), []))
        last = own_grammars.open(Grammar("regex", "[0-9]+!"), [])
        with pytest.raises(Refused, match="does not answer") as refused:
            wait_for(own_grammars, last)
        assert not refused.value.problem.is_of_grammar
    finally:
        signal.alarm(0)
        os.kill(own_grammars.processes.fork_server.pid, signal.SIGCONT)


@pytest.mark.parametrize("while_it", ["waits", "loads"])
def test_a_stopped_fork_server_is_replaced(own_grammars: GrammarPool, while_it: str) -> None:
    if while_it == "waits":
        own_grammars.close(open_request(own_grammars, LETTERS))
    wait_until(lambda: own_grammars.processes.fork_server.pid, "it begins")
    stopped = own_grammars.processes.fork_server.pid
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: own_grammars.processes.fork_server.state == STOPPED, "it is stopped")
    keys = [own_grammars.open(Grammar("regex", pattern), []) for pattern in ("a+", "b+", "c+")]
    ready: list[tuple[int, object]] = []

    def have_all() -> bool:
        ready.extend(own_grammars.poll())
        return len(ready) == len(keys)

    wait_until(have_all, "all are compiled")
    assert dict(ready) == dict.fromkeys(keys)
    assert own_grammars.processes.fork_server.pid != stopped
    for key in keys:
        own_grammars.close(key)


def test_a_stopped_supervisor_of_a_dead_fork_server_is_replaced(own_grammars: GrammarPool) -> None:
    """It starts no other fork server, so no grammar would be compiled again."""
    own_grammars.close(open_request(own_grammars, LETTERS))
    fork_server = own_grammars.processes.fork_server.pid
    os.kill(parent_of(fork_server), signal.SIGSTOP)
    kill(fork_server, fork_server)
    own_grammars.close(open_request(own_grammars, Grammar("regex", "[0-9]+!")))


def test_a_failed_fork_fails_one_order_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be too many processes for a moment."""

    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, control, request:
        for _ in range(2):
            socket.send_fds(ours, [b"+"], [theirs.fileno(), theirs.fileno()])
        theirs.close()
        ours.close()  # after both orders
        before = signal.getsignal(signal.SIGCHLD)
        try:
            _WorkerForks(control, lambda *_: None).run()
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
        assert request.recv(1) == b"", "closed"


def test_descriptors_above_1023_are_no_obstacle(tokenizer_folder: Path) -> None:
    """`select.select` fails above 1023, and a process may start with so many open descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        pool = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=8)
    finally:
        for descriptor in others:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    open_request(pool, LETTERS)
    pool.shut_down()


def test_a_killed_supervisor_is_replaced(own_grammars: GrammarPool) -> None:
    key = open_request(own_grammars, LETTERS)
    expected = allowed(own_grammars, key, [])
    fork_server = own_grammars.processes.fork_server.pid
    kill(parent_of(fork_server), fork_server)
    with pytest.raises(Refused, match="lost the processes") as refused:
        allowed(own_grammars, key, [])
    assert not refused.value.problem.is_of_grammar
    key = open_request(own_grammars, LETTERS)
    assert allowed(own_grammars, key, []) == expected
    own_grammars.close(key)


def test_a_supervisor_that_cannot_be_started_fails_one_request_only(
    own_grammars: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be too many processes for a moment."""
    key = open_request(own_grammars, LETTERS)
    expected = allowed(own_grammars, key, [])
    own_grammars.close(key)
    fork_server = own_grammars.processes.fork_server.pid
    kill(parent_of(fork_server), fork_server)

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as context:
        context.setattr(subprocess, "Popen", fail)
        with pytest.raises(Refused, match="lost the processes") as refused:
            open_request(own_grammars, Grammar("regex", "[0-9]+!"))
        assert not refused.value.problem.is_of_grammar
    key = open_request(own_grammars, Grammar("regex", "[a-z]+!|0"))
    assert set(expected) <= set(allowed(own_grammars, key, []))
    own_grammars.close(key)


@pytest.mark.usefixtures("never_stopped")
def test_the_load_time_of_another_fork_server_does_not_count(
    own_grammars: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_grammars.close(open_request(own_grammars, LETTERS))
    lost = own_grammars.processes.fork_server.pid
    kill(lost, lost)
    wait_until(lambda: own_grammars.processes.fork_server.pid != lost, "another fork server begins")
    os.kill(
        own_grammars.processes.fork_server.pid, signal.SIGSTOP
    )  # it loads when the next request comes
    with monkeypatch.context() as patch:
        patch.setattr(pool, "WAIT_S", 0.1)
        key = own_grammars.open(Grammar("regex", "[0-9]+!"), [])
        time.sleep(0.2)
        assert own_grammars.poll() == []
    os.kill(own_grammars.processes.fork_server.pid, signal.SIGCONT)
    wait_for(own_grammars, key)
    own_grammars.close(key)


def test_a_killed_process_is_not_the_fault_of_its_grammar(own_grammars: GrammarPool) -> None:
    """SIGKILL, as by the OOM killer. A later request compiles the grammar again."""
    key = open_request(own_grammars, LETTERS)
    expected = allowed(own_grammars, key, [])
    (worker,) = descendants(own_grammars.processes.fork_server.pid)
    kill(worker.number, worker.number)
    with pytest.raises(Refused, match="was killed") as refused:
        allowed(own_grammars, key, [])
    assert not refused.value.problem.is_of_grammar
    key = open_request(own_grammars, LETTERS)
    assert allowed(own_grammars, key, []) == expected
    own_grammars.close(key)


def test_a_stopped_process_is_ended(own_grammars: GrammarPool) -> None:
    """The scheduler waits for the masks, and all its requests with it."""
    key = open_request(own_grammars, LETTERS)
    (process,) = descendants(own_grammars.processes.fork_server.pid)
    os.kill(process.number, signal.SIGSTOP)
    with pytest.raises(Refused, match="does not answer") as refused:
        allowed(own_grammars, key, [])
    assert not refused.value.problem.is_of_grammar
    wait_until(lambda: not process.alive, "it has ended")


def test_a_stopped_compilation_is_ended_and_starts_again(own_grammars: GrammarPool) -> None:
    key = own_grammars.open(Grammar("regex", BOMB), [])
    wait_until_started(own_grammars)
    (process,) = descendants(own_grammars.processes.fork_server.pid)
    os.kill(process.number, signal.SIGSTOP)
    wait_until(lambda: not (own_grammars.poll() or process.alive), "it has ended")
    wait_until_started(own_grammars)
    own_grammars.close(key)


def test_a_compilation_ends_when_its_last_request_leaves(own_grammars: GrammarPool) -> None:
    own_grammars.close(open_request(own_grammars, LETTERS))
    (idle,) = descendants(own_grammars.processes.fork_server.pid)
    keys = [own_grammars.open(Grammar("regex", BOMB), []) for _ in range(2)]
    wait_until_started(own_grammars)
    (bomb,) = set(descendants(own_grammars.processes.fork_server.pid)) - {idle}
    own_grammars.close(keys[0])
    assert own_grammars.poll() == []
    assert bomb.alive
    own_grammars.close(keys[1])
    wait_until(lambda: not bomb.alive, "the compilation ends")
    assert idle.alive


def test_expensive_grammars_do_not_delay_a_usual_one(
    own_grammars: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is served, four of them have used their short CPU time, and none its full CPU time."""
    monkeypatch.setattr(pool, "WAIT_S", 60.0)  # short compilations are slow on a busy machine
    own_grammars.close(open_request(own_grammars, LETTERS))
    bombs = [own_grammars.open(Grammar("regex", f"{n}{BOMB}"), []) for n in range(4)]
    usual = open_request(own_grammars, Grammar("regex", "[0-9]+!"))
    for key in [usual, *bombs]:
        own_grammars.close(key)


def test_a_request_does_not_wait_longer_than_its_deadline(
    own_grammars: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_grammars.close(open_request(own_grammars, LETTERS))
    monkeypatch.setattr(pool, "WAIT_S", 1.0)
    bombs = [own_grammars.open(Grammar("regex", f"{n}{BOMB}"), []) for n in range(3)]
    told = {}
    while len(told) < len(bombs):
        told |= dict(own_grammars.poll())
    problems = [told[key] for key in bombs]
    assert all(problems), problems
    busy = [problem for problem in problems if problem and not problem.is_of_grammar]
    assert [problem.reason for problem in busy] == [
        "This worker is busy with other grammars"
    ] * len(busy)
    monkeypatch.undo()
    key = own_grammars.open(Grammar("regex", f"0{BOMB}"), [])
    assert own_grammars.poll() == [], "it was not remembered: the machine may have been busy"
    own_grammars.close(key)


def wait_until_started(grammars: GrammarPool) -> None:
    """Waits for the beginning of a compilation."""

    def has_started() -> bool:
        assert grammars.poll() == []
        compiling = [worker for worker in grammars._workers if worker.is_compiling]
        return any(worker.has_started for worker in compiling)

    wait_until(has_started, "a compilation begins")


def test_a_tokenizer_that_cannot_be_read_is_refused_once(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Any error: each further fork server would have it as well."""
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    grammars = start(tmp_path, vocab_size=VOCAB_SIZE, max_rows=8)
    for pattern in ("a", "b"):
        with pytest.raises(Refused, match="this model's tokenizer is not supported"):
            open_request(grammars, Grammar("regex", pattern))
    assert grammars.processes.fork_server.generation == 1
    grammars.shut_down()


def test_a_broken_installation_is_logged_once_with_its_cause(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = logging.FileHandler(tmp_path / "log")
    FORK_SERVER_LOG.addHandler(lines)
    # As if apache-tvm-ffi, which xgrammar imports, were missing.
    for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "mla_router.worker.grammar.xgrammar_backend", raising=False)
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    grammars = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=8)
    try:
        grammars.processes.warm_up()
        for pattern in ("a", "b"):
            with pytest.raises(Refused, match="cannot load xgrammar; its log says why"):
                open_request(grammars, Grammar("regex", pattern))
        assert grammars.processes.fork_server.generation == 1
    finally:
        grammars.shut_down()
        FORK_SERVER_LOG.removeHandler(lines)
        lines.close()
    said = (tmp_path / "log").read_text()
    assert said.count("xgrammar cannot be loaded") == 1
    assert "tvm_ffi" in said
