"""bench/accuracy/speculation_equality.py: the same answers with drafts, also of a worker that takes over; others are seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import speculation_equality
from random_requests import Answer, Request, random_requests
from speculation_equality import compare


def completion(text: str, *token_ids: int) -> Answer:
    found = Answer()
    choice = {"index": 0, "text": text, "token_ids": [*token_ids], "finish_reason": "stop"}
    found.add(choice)
    found.completion_tokens = len(token_ids)
    return found


def test_other_tokens_of_the_same_text_differ() -> None:
    asked = [Request("greedy", "/v1/completions", {})] * 3
    first = [completion("ab", 1, 2), completion("ab", 3), completion("c", 4)]
    other = [completion("ab", 1, 2), completion("ab", 1, 2), completion("c", 4)]
    result = compare(asked, first, other)
    assert (result["differ"], result["differ_by_kind"]) == (1, {"greedy": 1})
    assert compare(asked, first, first)["differ"] == 0


def test_pieces_of_a_stream_are_the_answer() -> None:
    whole, pieces = Answer(), Answer()
    call = {"function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}}
    whole.add({"index": 1, "message": {"content": "so", "tool_calls": [call]}})
    pieces.add({"index": 1, "delta": {"content": "s"}})
    pieces.add({"index": 1, "delta": {"content": "o"}})
    for function in ({"name": "get_time"}, {"arguments": '{"city":'}, {"arguments": ' "Oslo"}'}):
        pieces.add({"index": 1, "delta": {"tool_calls": [{"index": 0, "function": function}]}})
    assert whole == pieces


def test_requests_are_the_same_in_each_run() -> None:
    requests = random_requests(200, 0)
    assert requests == random_requests(200, 0)
    kinds = {request.kind for request in requests}
    assert {"json_schema", "tools", "stop strings", "n=2", "penalties"} < kinds
    assert 90 < sum("stream" in request.body for request in requests) < 110


@pytest.mark.slow
def test_every_token_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "equality.jsonl"
    argv = "x --num-questions=16 --num-shots=1 --num-random=48 --drafts=2 --kill --parallel=16"
    monkeypatch.setattr(sys, "argv", [*argv.split(), f"--out={out}"])
    assert speculation_equality.main() == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    names = [line["config"]["setting"] for line in lines]
    assert names[:2] == ["no drafts", "NEXTN k=2"]
    assert names[-1] == "NEXTN k=2, kill -9"
    assert all(line["differ"] == 0 for line in lines), lines
    assert all((line["accepted"] > 100) == ("NEXTN" in line["config"]["setting"]) for line in lines)
    assert lines[-1]["continued"] > 0
