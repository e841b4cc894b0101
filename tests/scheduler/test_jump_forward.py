"""Jump-forward decoding: forced tokens are computed in one step, and the tokens are the same as without it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from mla_router.worker.messages import Abort
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.step.engine import Capacity
from support.fake_engine import VOCAB, FakeEngine, continuation
from support.forcing_grammars import FORCING, ForcingGrammars, forced_continuation, forced_run
from support.scripted_scheduler import Run, assert_nothing_is_allocated, generate, run

PROMPT = [7, 8, 9, 10, 11, 12, 13]
LENGTH = 60
DRAFTED = Capacity(64, 4, 8, 128, tokens_per_row=4)
WAYS: list[dict[str, Any]] = [
    {"overlap": True},
    {"overlap": False},
    {"overlap": True, "chunk_size": 2},
    {"overlap": False, "chunk_size": 3},
    {"overlap": True, "use_prefix_cache": False},
    {"overlap": True, "disable_mixed_chunk": True},
    {"overlap": True, "capacity": DRAFTED},
    {"overlap": False, "capacity": DRAFTED},
    {"overlap": True, "capacity": DRAFTED, "disable_mixed_chunk": True},
]


def run_all(script: dict[int, list[Any]], **settings: Any) -> Run:
    grammars: Any = ForcingGrammars()
    outcome = run(script, grammars=grammars, **settings)
    assert_nothing_is_allocated(outcome)
    assert not grammars.outputs, "a request is still open"
    return outcome


def forced(rid: str, seed: int = 0, max_tokens: int = LENGTH, **fields: Any) -> Any:
    return generate(rid, PROMPT, max_tokens, seed=seed, grammar=FORCING, **fields)


def run_starts(tokens: list[int]) -> list[tuple[int, int]]:
    """Returns the start and the length of each forced run in an output."""
    starts, at = [], 0
    while at < len(tokens):
        length = len(forced_run(tokens[:at]))
        if length:
            starts.append((at, length))
        at += max(1, length)
    return starts


EXPECTED = forced_continuation(PROMPT, LENGTH)
RUNS = [(at, length) for at, length in run_starts(EXPECTED) if length > 1]


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_of_one_step_each(way: dict[str, Any]) -> None:
    requests = [forced("a"), forced("b", 1), generate("free", PROMPT, 50, seed=2), forced("c", 3)]
    outcome = run_all({0: requests[:3], 9: requests[3:]}, **way)
    for rid, seed in (("a", 0), ("b", 1), ("c", 3)):
        assert outcome.channel.tokens(rid) == forced_continuation(PROMPT, LENGTH, seed)
        assert outcome.channel.reason(rid) == "length"
    assert outcome.channel.tokens("free") == continuation(PROMPT, 50, 2)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_run_takes_one_step(overlap: bool) -> None:
    outcome = run_all({0: [forced("a")]}, overlap=overlap)
    saved = sum(min(at + length, LENGTH) - at - 1 for at, length in RUNS)
    assert saved > LENGTH // 4
    # One step for each token that is not forced; the first is that of the prompt.
    assert outcome.scheduler.stats().steps == LENGTH - saved
    deltas = [delta.token_ids for delta in outcome.channel.deltas()["a"]]
    assert [len(ids) for ids in deltas if len(ids) > 1] == [
        min(at + length, LENGTH) - at for at, length in RUNS
    ]
    assert outcome.scheduler.stats().generated_tokens == LENGTH


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_save_steps_under_a_grammar(overlap: bool) -> None:
    plain = run_all({0: [forced("a")]}, overlap=overlap)
    drafted = run_all({0: [forced("a")]}, overlap=overlap, capacity=DRAFTED)
    assert drafted.channel.tokens("a") == EXPECTED
    assert drafted.scheduler.stats().steps < plain.scheduler.stats().steps


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"logprobs": True}, {}),
        ({"presence_penalty": 0.5}, {}),
        ({}, {"disable_mixed_chunk": True}),
    ],
)
def test_a_request_that_needs_each_step_gets_the_same_tokens_one_by_one(
    overlap: bool, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    outcome = run_all({0: [forced("a", **fields)]}, overlap=overlap, **settings)
    assert outcome.channel.tokens("a") == EXPECTED
    deltas = [delta for delta in outcome.channel.deltas()["a"] if delta.token_ids]
    assert all(len(delta.token_ids) == 1 for delta in deltas)
    if "logprobs" in fields:
        assert all(delta.logprobs and len(delta.logprobs.logprobs) == 1 for delta in deltas)


@pytest.mark.parametrize("overlap", [True, False])
def test_max_tokens_may_come_anywhere_in_a_run(overlap: bool) -> None:
    at, length = max(RUNS[1:-1], key=lambda run: run[1])
    script = {i: [forced(f"{at + i}", max_tokens=at + i)] for i in range(1, length + 2)}
    outcome = run_all(dict(script), overlap=overlap)
    for count in range(at + 1, at + length + 2):
        assert outcome.channel.tokens(f"{count}") == EXPECTED[:count]
        assert outcome.channel.reason(f"{count}") == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_is_launched_past_a_run_that_reaches_max_tokens(overlap: bool) -> None:
    at, length = RUNS[0]
    outcome = run_all({0: [forced("a", max_tokens=at + length)]}, overlap=overlap)
    assert outcome.scheduler.stats().steps == at + 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_token_may_come_anywhere_in_a_run(overlap: bool) -> None:
    stops = {token for at, length in RUNS for token in EXPECTED[at : at + length]}
    assert len(stops) > 10
    requests = {
        i: [forced(f"{token}", stop_token_ids=frozenset({token}))] for i, token in enumerate(stops)
    }
    outcome = run_all(dict(requests), overlap=overlap)
    for token in stops:
        assert outcome.channel.tokens(f"{token}") == EXPECTED[: EXPECTED.index(token) + 1]
        assert outcome.channel.reason(f"{token}") == "stop"


@pytest.mark.parametrize("way", WAYS[::3])
def test_an_answer_continues_from_any_token_as_without_a_cut(way: dict[str, Any]) -> None:
    script = {cut: [forced(f"from {cut}", output=EXPECTED[:cut])] for cut in range(LENGTH)}
    outcome = run_all(dict(script), **way)
    for cut in range(LENGTH):
        assert outcome.channel.tokens(f"from {cut}") == EXPECTED[cut:]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted_requests_go_on_in_their_run(overlap: bool, page_size: int) -> None:
    outcome = run_all(
        {0: [forced(f"r{seed}", seed) for seed in range(6)]},
        overlap=overlap,
        capacity=Capacity(120 // page_size, page_size, num_slots=6, context_length=100),
        schedule_conservativeness=0.01,
    )
    assert outcome.scheduler.stats().retracted > 0
    for seed in range(6):
        assert outcome.channel.tokens(f"r{seed}") == forced_continuation(PROMPT, LENGTH, seed)


@pytest.mark.parametrize("at", range(1, 25))
def test_an_abort_ends_it_in_the_middle_of_a_run(at: int) -> None:
    outcome = run_all({0: [forced("a"), forced("b")], at: [Abort("a")]})
    got = outcome.channel.tokens("a")
    assert got == EXPECTED[: len(got)]
    assert outcome.channel.tokens("b") == EXPECTED


def test_forced_tokens_are_in_the_prefix_cache() -> None:
    """A later turn of the conversation finds them."""
    longer = [*PROMPT, *EXPECTED, 1, 2, 3]
    script = {0: [forced("a")], 200: [generate("b", longer, 5)]}
    capacity = Capacity(num_pages=64, page_size=4, num_slots=8, context_length=128)
    outcome = run_all(dict(script), capacity=capacity, engine=FakeEngine(capacity))
    computed = len(PROMPT) + LENGTH - 1  # the last token is never computed
    assert outcome.channel.deltas()["b"][0].cached_tokens == computed // 4 * 4
    assert outcome.channel.tokens("b") == continuation(longer, 5)
    assert max(longer) < VOCAB


def test_long_prompts_do_not_delay_a_jumping_request() -> None:
    """This includes an older prompt that was overtaken and takes whole steps."""
    cached = list(range(40))
    script: dict[int, list[Any]] = {
        0: [generate("warm", cached, 1)],
        5: [generate("a", [41, 42], 10), generate("b", [43, 44], 14)],
        8: [generate("long", [i % 37 for i in range(800)], 3)],
        9: [generate("jumps", [*cached, 1, 2], LENGTH, grammar=FORCING)],
    }
    capacity = Capacity(num_pages=2000, page_size=4, num_slots=2, context_length=4000)
    outcome = run_all(script, capacity=capacity, chunk_size=16, max_prefill_tokens=16)
    turns = outcome.channel.turns("jumps")
    assert turns[-1] < outcome.channel.turns("long")[0], "it was beside the long prompt"
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 2


@pytest.mark.parametrize(("run", "state"), [([7], State.DECODE), ([7, 8], State.PREFILL)])
def test_a_jump_of_one_token_is_none(run: list[int], state: State) -> None:
    """That token comes from the step that has just been sampled: there is nothing to compute."""
    jumps = Request(generate("r", PROMPT, 100))
    jumps.move_to(State.PREFILL)
    jumps.move_to(State.DECODE)
    jumps.launched_outputs = 1
    assert jumps.jump(run) == run[1:]
    assert jumps.state is state
