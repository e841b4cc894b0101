"""Compilation and matching by xgrammar (Dong et al., arXiv:2411.15100).

The only module that knows xgrammar. Nothing here is bounded: see `limits.py`.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from mla_router.worker.grammar import json_schema
from mla_router.worker.grammar.blanks import BlankRun, BlankTokens
from mla_router.worker.grammar.errors import MAX_DEPTH, GrammarError
from mla_router.worker.grammar.specialize import specialize
from mla_router.worker.grammar.vocabulary import Vocabulary
from mla_router.worker.messages import Grammar

TRIAL_TOKENS = 24
THREADS_AFTER_S = 0.0003  # as long as it takes to start them, and 60 masks of a usual schema

# "[12:00:00] /project/cpp/regex_converter.cc:83: Regex parsing error ..."
_ORIGIN = re.compile(r"^.*?\.(?:cc|h):\d+: (?:Check failed: .*? is false: )?", re.DOTALL)


class Compiler:
    """Compiles grammars for one vocabulary. Loading it takes seconds, forking it does not."""

    def __init__(self, vocabulary: Vocabulary, *, any_whitespace: bool = True) -> None:
        self.vocab_size = len(vocabulary.pieces)
        self.eos_ids = vocabulary.eos_ids
        self._info = xgrammar.TokenizerInfo(
            vocabulary.pieces,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=vocabulary.eos_ids,
        )
        # No threads: this process is going to be forked. The cache is for rules that look alike, as a
        # schema's strings do: each is looked at once.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=True)
        self._any_whitespace = any_whitespace
        self._blanks = BlankTokens(vocabulary.pieces)

    def begin(self, grammar: Grammar, compiled: xgrammar.CompiledGrammar) -> Matcher:
        """For a new output."""
        free = self._any_whitespace and grammar.kind in ("json_schema", "structural_tag")
        return Matcher(compiled, BlankRun(self._blanks) if free else None)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises GrammarError."""
        compiler, source = self._compiler, grammar.source
        try:
            match grammar.kind:
                case "json_schema":
                    return compiler.compile_grammar(self._of_schema(source))
                case "regex":
                    return compiler.compile_regex(source)
                case "ebnf":
                    return compiler.compile_grammar(source)
                case "structural_tag":
                    return compiler.compile_structural_tag(self._structural_tag(source))
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_ORIGIN.sub("", str(error)).strip()) from None

    def _of_schema(self, schema: str) -> str:
        grammar = xgrammar.Grammar.from_json_schema(
            json_schema.prepare(schema), any_whitespace=self._any_whitespace
        )
        return specialize(str(grammar))

    def _structural_tag(self, source: str) -> str:
        """Check the schemas inside, as those that come alone."""
        try:
            tag = json.loads(source)
        except (ValueError, RecursionError):
            raise GrammarError("not valid JSON") from None
        self._prepare_inside(tag, MAX_DEPTH)
        return json.dumps(tag)

    def _prepare_inside(self, node: object, depth: int) -> None:
        if depth == 0:
            raise GrammarError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            for item in node:
                self._prepare_inside(item, depth - 1)
        elif isinstance(node, dict):
            if _is_json(node):
                # Tags have no way to say how JSON is spaced, but may hold any grammar.
                grammar = self._of_schema(json.dumps(node["json_schema"]))
                node.clear()
                node |= {"type": "grammar", "grammar": grammar}
            for key, value in node.items():
                if key == "json_schema":
                    node[key] = json.loads(json_schema.prepare(json.dumps(value)))
                else:
                    self._prepare_inside(value, depth - 1)


class Matcher:
    """How far one output has come in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, blanks: BlankRun | None = None) -> None:
        """`blanks` bounds them, if the grammar does not."""
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._blanks = blanks

    def accept(self, token: int) -> bool:
        """Go on by one token; False if the grammar does not allow it here."""
        if self._blanks is not None:
            self._blanks.add(token)
        return self._matcher.accept_token(token)

    def forced_text(self) -> str:
        """What every sentence goes on with from here, as far as it is certain."""
        if self.is_terminated:
            return ""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # what is certain ends within a character
            return ""

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Write to masks[row], of [R, ceil(vocab / 32)] int32, which tokens may come next."""
        self._matcher.fill_next_token_bitmask(masks, row)
        self._bound(masks[row])

    def _bound(self, mask: np.ndarray) -> None:
        if self._blanks is not None:
            self._blanks.bound(mask)

    @property
    def is_terminated(self) -> bool:
        """Has accepted a token that ends the answer."""
        return self._matcher.is_terminated()


class BatchFiller:
    """Writes the masks of many outputs: one after the other, but what is left after `THREADS_AFTER_S` side
    by side. Most grammars are done by then; xgrammar starts its threads anew for each batch."""

    def __init__(self, max_threads: int) -> None:
        self._batch = xgrammar.BatchGrammarMatcher(max_threads)

    def fill(self, matchers: Sequence[Matcher], masks: np.ndarray, rows: Sequence[int]) -> None:
        """Write to masks[rows[i]], of [R, ceil(vocab / 32)] int32, what may follow in matchers[i]."""
        until = time.perf_counter() + THREADS_AFTER_S
        for done, (matcher, row) in enumerate(zip(matchers, rows, strict=True), start=1):
            matcher.fill(masks, row)
            if time.perf_counter() > until:
                self._fill_by_threads(matchers[done:], masks, rows[done:])
                return

    def _fill_by_threads(
        self, matchers: Sequence[Matcher], masks: np.ndarray, rows: Sequence[int]
    ) -> None:
        if matchers:
            batch = [matcher._matcher for matcher in matchers]
            self._batch.batch_fill_next_token_bitmask(batch, masks, list(rows))
        for matcher, row in zip(matchers, rows, strict=True):
            matcher._bound(masks[row])


def trial_run(compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
    """Follow random paths, as a model without a mind would. Raises GrammarError where no token can
    come next; what takes too long, takes too long here and not in a step."""
    masks = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    choose = random.Random(0)
    for _ in range(2):
        matcher = Matcher(compiled)
        for _ in range(TRIAL_TOKENS):
            matcher.fill(masks, 0)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
            if len(allowed) == 0:
                raise GrammarError("leads to where nothing is allowed: it describes no text")
            matcher.accept(int(choose.choice(allowed)))
            if matcher.is_terminated:
                break


def _is_json(node: dict[str, Any]) -> bool:
    """Whether a part of a structural tag is JSON, and not one of the dialects of XML."""
    return (
        node.get("type") == "json_schema"
        and node.get("style", "json") == "json"
        and "json_schema" in node
    )
