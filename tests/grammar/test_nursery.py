"""When the process dies that all grammars' processes come from."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_router.worker.grammar.pool import Grammars, start
from mla_router.worker.messages import Grammar
from support.grammar_driver import Refused, allowed, open_request, wait_for
from support.tiny_model import VOCAB_SIZE

LETTERS = Grammar("regex", "[a-z]+!")


@pytest.fixture
def own_grammars(tokenizer_folder: Path) -> Iterator[Grammars]:
    """Its nursery may be killed."""
    pool = start(tokenizer_folder, vocab_size=VOCAB_SIZE, max_rows=8)
    yield pool
    pool.shut_down()


def kill(pid: int, wait_for_end_of: int) -> None:
    """Returns when the other process has ended, and so has told its own children to."""
    descriptor = os.pidfd_open(wait_for_end_of)
    os.kill(pid, signal.SIGKILL)
    assert select.select([descriptor], [], [], 30)[0], f"{wait_for_end_of} does not end"
    os.close(descriptor)


def test_what_was_open_is_lost_and_what_comes_then_is_served(own_grammars: Grammars) -> None:
    for _ in range(2):
        key = open_request(own_grammars, LETTERS)
        expected = allowed(own_grammars, key, [])
        compiling = own_grammars.open(Grammar("regex", "(a|b){3000}"), [])
        nursery = own_grammars.nursery.pid
        kill(nursery, nursery)
        with pytest.raises(Refused, match="lost the processes") as refused:
            allowed(own_grammars, key, [])
        assert not refused.value.problem.is_of_grammar
        with pytest.raises(Refused, match="lost the processes"):
            wait_for(own_grammars, compiling)
        key = open_request(own_grammars, LETTERS)
        assert allowed(own_grammars, key, []) == expected
        own_grammars.close(key)


def test_if_none_begins_any_more_it_is_not_the_grammars_fault(own_grammars: Grammars) -> None:
    own_grammars.close(open_request(own_grammars, LETTERS))
    nursery = own_grammars.nursery.pid
    keeper = int(Path(f"/proc/{nursery}/stat").read_text().rpartition(")")[2].split()[1])
    kill(keeper, nursery)
    for pattern in ("a", "b", "a"):
        with pytest.raises(Refused, match="lost the processes") as refused:
            open_request(own_grammars, Grammar("regex", pattern))
        assert not refused.value.problem.is_of_grammar
