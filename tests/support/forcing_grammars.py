"""Grammars without processes: at some places they force tokens, at others they allow all.

The forced tokens are a hash of the output so far, so a run that is lost, repeated or shifted changes all later
tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.pool import Answers
from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.messages import Grammar
from support.fake_engine import VOCAB, next_token

FORCING = Grammar("regex", "any")


def forced_run(output: Sequence[int]) -> list[int]:
    """Returns the tokens forced after `output`: none, or a run of one to seven."""
    run: list[int] = []
    for length in range(len(output) + 1):
        if length:
            run = run[1:] if run and run[0] == output[length - 1] else []
        if not run and (size := next_token([*output[:length], 1], 0, range(12))) < 6:
            texts = itertools.accumulate(
                range(size + 2), lambda state, i: state * 31 + i, initial=7
            )
            run = [next_token([*output[:length], state], 0) for state in texts]
            run = run[: size + 2]
    return run


def forced_continuation(
    prompt: list[int],
    count: int,
    seed: int = 0,
    stops: Collection[int] = (),
    output: Sequence[int] = (),
) -> list[int]:
    """Returns `continuation` under the grammar: at most `count` tokens after `prompt` and `output`."""
    tokens = list(output)
    while len(tokens) < len(output) + count:
        run = forced_run(tokens)
        tokens.append(run[0] if run else next_token(prompt + tokens, seed))
        if tokens[-1] in stops:
            break
    return tokens[len(output) :]


LOST = Problem("the process has ended", is_of_grammar=False)


class ForcingGrammars:
    """Replaces `GrammarPool`."""

    def __init__(self, max_rows: int = 256, vocab_size: int = VOCAB) -> None:
        self.memory = MaskMemory.create(max_rows, vocab_size)
        self.vocab_size = vocab_size
        self.step = 0
        self.eos_ids: frozenset[int] = frozenset()
        self.outputs: dict[int, list[int]] = {}  # of open requests
        # Set it to have the process of all open requests end in the next `fill`
        self.is_lost = False
        self._keys = itertools.count()
        self._opened: list[int] = []
        self._failed: list[tuple[int, Problem | None]] = []

    def open(self, grammar: Grammar, output: Sequence[int]) -> int:
        assert grammar == FORCING
        key = next(self._keys)
        self.outputs[key] = list(output)
        self._opened.append(key)
        return key

    @property
    def masks(self) -> np.ndarray:
        return self.memory.of(self.step)

    @property
    def has_failures(self) -> bool:
        return bool(self._failed)

    def poll(self) -> list[tuple[int, Problem | None]]:
        opened, self._opened = self._opened, []
        failed, self._failed = self._failed, []
        return [(key, None) for key in opened if key in self.outputs] + failed

    def fill(
        self, rows: Sequence[tuple[int, list[int]]], drafts: Sequence[list[int]] = ()
    ) -> Answers:
        self.step = self.memory.begin()
        if self.is_lost:
            return self._lose([key for key, _ in rows])
        runs, counts = {}, {}
        octets = self.masks.view(np.uint8)
        at = 0
        for (key, tokens), ahead in zip(rows, drafts or [[] for _ in rows], strict=True):
            self.outputs[key] += tokens
            if run := forced_run(self.outputs[key]):
                runs[key] = run
            counts[key] = 0
            for rank in range(1 + len(ahead)):
                run = forced_run(self.outputs[key] + ahead[:rank])
                bits = np.zeros(self.masks.shape[1] * 32, dtype=np.uint8)
                bits[run[:1] or range(self.vocab_size)] = 1
                octets[at + rank] = np.packbits(bits, bitorder="little")
                counts[key] += 1
                if run:
                    break
            at += 1 + len(ahead)
        return Answers({}, runs, counts)

    def close(self, key: int) -> None:
        self.outputs.pop(key, None)
        self._failed = [item for item in self._failed if item[0] != key]

    def _lose(self, asked: Sequence[int]) -> Answers:
        self._failed += [(key, LOST) for key in self.outputs if key not in asked]
        self.is_lost, self.outputs = False, {}
        return Answers(dict.fromkeys(asked, LOST), {})
