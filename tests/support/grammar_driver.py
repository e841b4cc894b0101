"""Gets token bitmasks from a pool as the scheduler does, and generates allowed texts."""

from __future__ import annotations

import random
import time

import numpy as np

from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.pool import GrammarPool
from mla_router.worker.messages import Grammar
from support.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS_ID = int(TOKENIZER.eos_token_id)


class Refused(Exception):
    """A refused grammar, or a grammar worker that ended, with the message for the client."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


def open_request(pool: GrammarPool, grammar: Grammar, output: list[int] | None = None) -> int:
    """Opens a request and returns its key when its first bitmask is available. Raises Refused."""
    key = pool.open(grammar, output or [])
    wait_for(pool, key)
    return key


def wait_for(pool: GrammarPool, key: int) -> None:
    while True:
        for other, problem in pool.poll():
            assert other == key, f"{other} was told while {key} waited"
            if problem:
                pool.close(key)
                raise Refused(problem)
            return
        time.sleep(0.001)  # no message announces a compiled grammar


def allowed(pool: GrammarPool, key: int, tokens: list[int]) -> list[int]:
    """Returns the tokens that the grammar allows after `tokens` more. Raises Refused."""
    failed = pool.fill([(key, tokens)]).failed
    if failed:
        pool.close(key)
        raise Refused(failed[key])
    bits = np.unpackbits(pool.masks[0].view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def write(pool: GrammarPool, key: int, seed: int, limit: int = 4000) -> list[int]:
    """Returns a random text of an open grammar, without EOS. It ends where the grammar first allows it."""
    choose = random.Random(seed)
    tokens: list[int] = []
    new: list[int] = []
    while True:
        choices = allowed(pool, key, new)
        assert choices, f"nothing may follow {TOKENIZER.decode(tokens)!r}"
        if EOS_ID in choices:
            return tokens
        # A long text is closed, because random strings and lists would not end.
        closing = (TOKENIZER.convert_tokens_to_ids(mark) for mark in '"]}')
        ends = [token for token in closing if len(tokens) > 60 and token in choices]
        new = [ends[0] if ends and choose.random() < 0.5 else choose.choice(choices)]
        tokens += new
        assert len(tokens) < limit, f"does not end: {TOKENIZER.decode(tokens)!r}"


def text(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))
