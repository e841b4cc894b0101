"""Compilation and matching with xgrammar (Dong et al., arXiv:2411.15100).

The only module that uses xgrammar. The time of its functions is unlimited: see `limits.py`.
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

from mla_router.worker.grammar import json_schema, regex_syntax
from mla_router.worker.grammar.blanks import BlankRun, BlankTokens
from mla_router.worker.grammar.errors import MAX_DEPTH, GrammarError
from mla_router.worker.grammar.long_strings import MAX_REPETITIONS, divide
from mla_router.worker.grammar.specialize import specialize
from mla_router.worker.grammar.vocabulary import Vocabulary
from mla_router.worker.messages import Grammar

TRIAL_TOKENS = 24
THREADS_AFTER_S = 0.0003  # the time to start the threads; 60 masks of a usual schema

# "[12:00:00] /project/cpp/regex_converter.cc:83: Regex parsing error ..."
_ORIGIN = re.compile(r"^.*?\.(?:cc|h):\d+: (?:Check failed: .*? is false: )?", re.DOTALL)

# An escape in the text of a grammar. xgrammar writes é as \xe9, but reads `\xe9a` as one letter.
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)
_ERRORS = (RuntimeError, ValueError, TypeError)  # of xgrammar


class Compiler:
    """Compiles grammars for one vocabulary. It takes seconds to load and is cheap to fork."""

    def __init__(self, vocabulary: Vocabulary, *, any_whitespace: bool = True) -> None:
        self.vocab_size = len(vocabulary.pieces)
        self.eos_ids = vocabulary.eos_ids
        self._info = xgrammar.TokenizerInfo(
            vocabulary.pieces,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=vocabulary.eos_ids,
        )
        # No threads, because this process will be forked. The cache is for equal rules, such as the strings of a
        # schema.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=True)
        self._any_whitespace = any_whitespace
        self._blanks = BlankTokens(vocabulary.pieces)

    def begin(self, grammar: Grammar, compiled: xgrammar.CompiledGrammar) -> Matcher:
        """Returns the matcher of a new output."""
        free = self._any_whitespace and grammar.kind in ("json_schema", "structural_tag")
        return Matcher(compiled, BlankRun(self._blanks) if free else None)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compiles a grammar. Raises GrammarError."""
        compiler, source = self._compiler, grammar.source
        try:
            match grammar.kind:
                case "json_schema":
                    return compiler.compile_grammar(self._of_schema(source))
                case "regex":
                    return compiler.compile_regex(regex_syntax.prepare(source))
                case "ebnf":
                    return compiler.compile_grammar(source)
                case "structural_tag":
                    return compiler.compile_structural_tag(self._structural_tag(source))
        except _ERRORS as error:
            raise GrammarError(_reason(error)) from None

    def _structural_tag(self, source: str) -> str:
        """Rewrites the schemas in a structural tag, as those of `json_schema` grammars. Returns the new tag."""
        try:
            tag = json.loads(source)
        except (ValueError, RecursionError):
            raise GrammarError("not valid JSON") from None
        self._prepare_inside(tag, MAX_DEPTH)
        return json.dumps(tag)

    def _prepare_inside(self, node: object, depth: int) -> None:
        """Rewrites the schemas and regular expressions in `node` in place. Raises GrammarError."""
        if depth == 0:
            raise GrammarError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            for item in node:
                self._prepare_inside(item, depth - 1)
        elif isinstance(node, dict):
            if _is_json(node):
                # Structural tags cannot set the whitespace of JSON, but they may contain any grammar.
                grammar = self._of_part(node)
                node.clear()
                node |= {"type": "grammar", "grammar": grammar}
            if node.get("type") == "regex" and isinstance(pattern := node.get("pattern"), str):
                node["pattern"] = regex_syntax.prepare(pattern)
            for key, value in node.items():
                if key == "json_schema":
                    node[key] = json.loads(json_schema.prepare(json.dumps(value)))
                else:
                    self._prepare_inside(value, depth - 1)

    def _of_part(self, node: dict[str, Any]) -> str:
        """Returns the grammar of a schema in a structural tag. Raises GrammarError, which begins with its `field`."""
        try:
            return self._of_schema(json.dumps(node["json_schema"]))
        except GrammarError as error:
            reason = str(error)
        except _ERRORS as error:
            reason = _reason(error)
        raise GrammarError(f"{node['field']}: {reason}" if "field" in node else reason)

    def _of_schema(self, schema: str) -> str:
        """Returns the grammar of a JSON schema. Raises GrammarError, and the errors of xgrammar."""
        grammar = xgrammar.Grammar.from_json_schema(
            json_schema.prepare(schema), any_whitespace=self._any_whitespace
        )
        return _ESCAPE.sub(_with_four_digits, divide(specialize(str(grammar))))


class Matcher:
    """The state of one output in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, blanks: BlankRun | None = None) -> None:
        """`blanks` limits the blanks, if the grammar does not."""
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._blanks = blanks

    def accept(self, token: int) -> bool:
        """Accepts one token. Returns False if the grammar does not allow it."""
        if self._blanks is not None:
            self._blanks.add(token)
        return self._matcher.accept_token(token)

    @property
    def num_blanks(self) -> int:
        """Blanks at the end of the output, as far as they are limited."""
        return 0 if self._blanks is None else self._blanks.length

    def roll_back(self, count: int, num_blanks: int) -> None:
        """Returns to the state before the last `count` accepted tokens. `num_blanks`: those of that state."""
        if count:
            self._matcher.rollback(count)
        if self._blanks is not None:
            self._blanks.length = num_blanks

    def forced_text(self) -> str:
        """Returns the text with which every sentence continues; empty if there is a choice."""
        if self.is_terminated:
            return ""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # the text ends within a character
            return ""

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Writes the bitmask of the next tokens to masks[row]. `masks` is [R, ceil(vocab / 32)] int32."""
        self._matcher.fill_next_token_bitmask(masks, row)
        self._bound(masks[row])

    def _bound(self, mask: np.ndarray) -> None:
        if self._blanks is not None:
            self._blanks.bound(mask)

    @property
    def is_terminated(self) -> bool:
        """Whether the matcher has accepted an EOS token."""
        return self._matcher.is_terminated()


class BatchFiller:
    """Writes the masks of many outputs: one after the other for `THREADS_AFTER_S`, the remaining ones in threads. Most
    batches need no threads, which xgrammar starts for each batch."""

    def __init__(self, max_threads: int) -> None:
        self._batch = xgrammar.BatchGrammarMatcher(max_threads)

    def fill(self, matchers: Sequence[Matcher], masks: np.ndarray, rows: Sequence[int]) -> None:
        """Writes the mask of matchers[i] to masks[rows[i]]. `masks` is [R, ceil(vocab / 32)] int32."""
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
    """Follows random paths through the grammar. Raises GrammarError at a dead end. An expensive grammar exceeds its
    limit here and not in a step."""
    masks = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    choose = random.Random(0)
    for _ in range(2):
        matcher = Matcher(compiled)
        for _ in range(TRIAL_TOKENS):
            matcher.fill(masks, 0)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
            if len(allowed) == 0:
                raise GrammarError("describes no text: no token is allowed at a dead end")
            matcher.accept(int(choose.choice(allowed)))
            if matcher.is_terminated:
                break


def _with_four_digits(escape: re.Match[str]) -> str:
    return rf"\u00{escape[1]}" if escape[1] else escape[0]


def _reason(error: Exception) -> str:
    # A failed check of xgrammar has no text.
    unknown = f"xgrammar cannot compile it, perhaps because a pattern repeats a part more than {MAX_REPETITIONS} times"
    return _ORIGIN.sub("", str(error)).strip() or unknown


def _is_json(node: dict[str, Any]) -> bool:
    """Returns whether a part of a structural tag is JSON, and not one of xgrammar's XML styles."""
    return (
        node.get("type") == "json_schema"
        and node.get("style", "json") == "json"
        and "json_schema" in node
    )
