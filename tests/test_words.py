"""Words that this project once used instead of the field's terms do not come back into sources and docs.

`PRIVATE` maps a word to the paths that may still contain it. A path is a prefix: a file or a folder. Upper and lower
case count. Words with another, common meaning do not belong here. docs/glossary.md has the terms of our own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from file_sizes import ROOT

HERE = "tests/test_words.py"
# Histories are not rewritten.
HISTORY = ("CHANGELOG.md", "bench/results/")
PRIVATE: dict[str, tuple[str, ...]] = {
    # the engine: ForwardOutput, AsyncCopy, warm-up compile, profile run, captured graphs
    "ReadbackRing": (),
    "compile_together": (),
    "dearest_plans": (),
    "check_recorded": (),
    "replace_recording": (),
    "Unrecorded": (),
    # the scheduler: prefill budget, measured step time, preemption, shared-prefix batching
    "made_way": (),
    "make_way": (),
    "place_in_tree": (),
    "settled_length": (),
    "held_tokens": (),
    # sampling: params and features by level, token bitmask
    "SlotWants": (),
    "SlotSettings": (),
    "RowSettings": (),
    # logprobs
    "RowScores": (),
    "prompt_scores": (),
    "score_tokens": (),
    "score_start": (),
    "score_hidden": (),
    # the server: RequestHandler, shared counters, barrier, extra API process
    "NativeSampling": (),
    "named_requests": (),
    "scored_tokens": (),
    "SIBLING_STOP_S": (),
    "sibling_processes": (),
    # grammars: supervisor, fork server, grammar worker
    "HostClient": (),
    "HostLost": (),
    # models: Weight and WeightFormat, weight mapping, NextN layers, hidden_states and residual
    "Fp8Linear": (),
    "Fp8Experts": (),
    "dense_weight": (),
    "load_prediction": (),
    "PredictionLayer": (),
    "ExpandedAttention": (),
    "expanded_cache": (),
    "expanded_width": (),
    # kernels: out_cache_loc, KV heads, head_dim
    "cache_locations": (),
    "prompt_locations": (),
    "key_heads": (),
    "key_width": (),
    "value_width": (),
    # the router: LoadGuard, RouteClass, AttemptError, dispatch, PeekedResponse, HealthState, InsertReceipt, LruTick,
    # single-flight prefill, Lifecycle, DeadlineTimer, DebouncedFileWatch, rendezvous owner, RequestLog
    "book_light": (),
    "note_trouble": (),
    "take_note": (),
    "HomeShare": (),
    "home_share": (),
    "at_home": (),
    # the router: connection permits, AcceptedConnection, line keys, has_failures, retract_insertion, figures
    "WorkerMoment": (),
    "RouterMoment": (),
    # the server and its tests: logprobs, received messages, time limits
    "ScoredTokens": (),
    "CompletionScorer": (),
    "READS_A_TURN": (),
    "RESUMED_A_TURN": (),
    "wait_heard": (),
    # the scheduler's heartbeat
    "PulseWatch": (),
    "pulse_watch": (),
    "pulse_fd": (),
    "beat_within_steps": (),
}


def tracked() -> list[str]:
    """Returns the paths of all sources and documents, without the histories."""
    patterns = ["*.py", "*.pyi", "*.rs", "*.md", "*.toml", "*.html", "*.js", "*.yml", "*.yaml"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = listed.stdout.split("\0")
    return [path for path in paths if path and path != HERE and not path.startswith(HISTORY)]


class Words:
    """Finds the private words of a mapping from words to the paths that may contain them."""

    def __init__(self, private: dict[str, tuple[str, ...]]) -> None:
        self._private = private
        self._pattern = re.compile(rf"\b(?:{'|'.join(sorted(private, key=len, reverse=True))})\b")

    def found(self, path: str, text: str) -> Iterator[str]:
        """Yields `PATH:LINE: WORD` for each private word that `path` may not contain."""
        for match in self._pattern.finditer(text):
            if not path.startswith(self._private[match[0]]):
                yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"


def test_no_private_words() -> None:
    words, problems = Words(PRIVATE), []
    for path in tracked():
        file = ROOT / path
        if file.is_file():  # a deleted file is listed until it is committed
            problems += words.found(path, file.read_text())
        problems += words.found(path, re.sub(r"[_/.]", " ", path))
    assert problems == []


def test_a_private_word_is_found() -> None:
    words = Words({"Readback": (), "Pulse": ("router/",)})
    assert list(words.found("docs/x.md", "a\nthe Readback of")) == ["docs/x.md:2: Readback"]
    assert list(words.found("router/src/x.rs", "struct Pulse;")) == []
    assert list(words.found("worker/x.py", "class Pulse:")) == ["worker/x.py:1: Pulse"]
    assert list(words.found("docs/x.md", "Readbacks")) == []
