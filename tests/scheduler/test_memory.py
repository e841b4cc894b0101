"""`Memory` against a model that keeps every token written to a page."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla_router.worker.generation import FinishReason, SamplingParams
from mla_router.worker.messages import Generate
from mla_router.worker.scheduler.memory import Memory
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.step.engine import Capacity
from support.examples import examples
from support.scripted_scheduler import generate

PROMPTS = [[(i // 5 * k + i) % 3 for i in range(200)] for k in (0, 1)]


class MemoryMachine(RuleBasedStateMachine):
    """Requests are admitted, computed and released in any order, without a scheduler."""

    @initialize(
        page_size=st.sampled_from([1, 16, 32, 64]),
        use_cache=st.booleans(),
        window=st.sampled_from([None, 1, 30]),
    )
    def start(self, page_size: int, use_cache: bool, window: int | None) -> None:
        # The pages of four requests of 200 tokens.
        pages = 4 * -(-200 // page_size) * (1 if window is None else 2)
        self.memory = Memory(
            Capacity(pages, page_size, 4, 200, window=window), use_prefix_cache=use_cache
        )
        self.written: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self.live: list[Request] = []
        self.count = 0
        self.random = random.Random(0)

    @precondition(lambda self: self.memory.free_slots)
    @rule(
        which=st.integers(0, 1),
        length=st.integers(1, 150),
        salt=st.sampled_from(["", "x"]),
        scored_from=st.none() | st.integers(0, 150),
    )
    def admit(self, which: int, length: int, salt: str, scored_from: int | None) -> None:
        self.count += 1
        sampling = SamplingParams(50, prompt_logprobs_from=scored_from)
        prompt = PROMPTS[which][:length]
        request = Request(Generate(f"r{self.count}", prompt, sampling, cache_salt=salt))
        node, pages = self.memory.find_prefix(request)
        self.memory.cache.lock(node)
        self.memory.admit(request, node, pages)
        self.live.append(request)
        assert request.num_cached <= request.max_cached < length
        for at in range(request.num_cached):
            assert self.read(request, at) == request.prompt[at]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 80))
    def compute(self, data: st.DataObject, tokens: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if request.state is State.PREFILL:
            chunk = request.take_chunk(tokens)
            self.write(request, chunk.start, list(chunk.tokens))
            self.memory.share(request)
            if chunk.is_last:
                request.add_token(self.random.randrange(3))
        else:
            for _ in range(min(tokens, request.sampling.max_tokens - request.launched_outputs)):
                at = request.take_decode(1) - 1
                self.write(request, at, [request.output[-1]])
                request.add_token(self.random.randrange(3))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["stop", "error", "retract"]))
    def let_go(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        room = self.memory.room_without([request])
        if how == "retract":
            request.retract()
        else:
            request.finish(FinishReason(how))
        self.memory.release(request)
        assert self.memory.room == room or (self.memory.room > room and self.memory.windows)

    @rule()
    def flush(self) -> None:
        self.memory.flush_cache()
        kinds = self.memory.capacity.page_kinds
        held = kinds * sum(len(request.place.pages) for request in self.live)
        assert self.memory.room >= self.memory.capacity.num_pages - held

    def write(self, request: Request, start: int, tokens: list[int]) -> None:
        end = start + len(tokens)
        new = self.memory.grow(request, end)
        capacity, windows = self.memory.capacity, self.memory.windows
        held, indices = request.place.pages, [index for _, index, _ in new]
        grown = range(len(held) - len(new) // capacity.page_kinds, len(held))
        behind = [] if windows is None else [capacity.pages_per_request + index for index in grown]
        assert indices == [*grown, *behind]
        for at, token in enumerate(tokens, start):
            page, place = divmod(at, self.memory.page_size)
            self.written[held[page], place] = token
            if windows is not None:
                self.written[windows.of([held[page]])[0], place] = token
        request.computed_length = end
        if windows is not None:
            self.memory.leave_window(request)

    def read(self, request: Request, at: int) -> int:
        page, place = divmod(at, self.memory.page_size)
        return self.written[request.place.pages[page], place]

    @invariant()
    def pages_hold_what_their_owners_wrote(self) -> None:
        for request in getattr(self, "live", ()):
            known = request.prompt + request.output
            for at in range(request.computed_length):
                assert self.read(request, at) == known[at], (request, at)
            window = self.memory.capacity.window or 1
            for at in range(max(0, request.computed_length + 1 - window), request.computed_length):
                page, place = divmod(at, self.memory.page_size)
                assert self.memory.windows is not None
                (own,) = self.memory.windows.of([request.place.pages[page]])
                assert self.written[own, place] == known[at], (request, at)

    @invariant()
    def cached_pages_hold_the_tokens_that_they_are_found_by(self) -> None:
        for node in self.memory.cache if hasattr(self, "memory") else ():
            size = self.memory.page_size
            for at, token in enumerate(node.tokens):
                assert self.written[node.pages[at // size], at % size] == token

    @invariant()
    def every_page_and_slot_has_one_owner(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check(self.live)


MemoryMachine.TestCase.settings = examples(80, stateful_step_count=50, deadline=None)
TestMemory = MemoryMachine.TestCase


def window_memory(pages: int, window: int) -> Memory:
    """Returns memory with pages of four tokens."""
    return Memory(Capacity(pages, 4, 4, 100, window=window), use_prefix_cache=True)


def computed(memory: Memory, tokens: list[int], max_tokens: int = 1) -> Request:
    """Returns a request that has computed its prompt in one chunk, as far as it is not cached."""
    request = Request(generate("r", tokens, max_tokens))
    node, pages = memory.find_prefix(request)
    memory.cache.lock(node)
    memory.admit(request, node, pages)
    request.take_chunk(len(tokens))
    memory.grow(request, len(tokens))
    request.computed_length = len(tokens)
    memory.share(request)
    memory.leave_window(request)
    return request


def test_pages_behind_a_window_are_spare_until_they_are_needed() -> None:
    memory = window_memory(20, window=8)
    first = computed(memory, list(range(40)))  # 10 pages and 10 window pages
    # The next token reads the window pages of 7 tokens before it, which are 2
    assert memory.room == 8
    second = computed(memory, [90, 91, 92, 93, 94])
    memory.check([first, second])
    assert memory.room == 4
    # The oldest are gone: a prompt that branches off there finds no prefix
    for length, cached in ((9, 0), (17, 0), (25, 24), (40, 40)):
        request = Request(generate("x", [*range(length), 99], 1))
        assert memory.cached_tokens(request) == cached, length


def test_a_prefix_needs_the_pages_of_its_window() -> None:
    """The end of an answer is found again after its request has ended."""
    memory = window_memory(40, window=8)
    first = computed(memory, list(range(40)))
    first.finish(FinishReason.STOP)
    memory.release(first)
    memory.check([])
    assert memory.room == 40
    second = computed(memory, [*range(40), 50, 51])
    assert second.num_cached == 40
    third = computed(memory, [*range(20), 60])
    assert third.num_cached == 20
    memory.check([second, third])
    # It shares both window pages of its prefix with a reader until that ends
    for taken in (0, 2):
        fourth = Request(generate("x", [*range(20), 70], 1))
        assert memory.taken_by_prefix(memory.find_prefix(fourth)[1]) == taken
        if taken == 0:
            third.finish(FinishReason.STOP)
            memory.release(third)


def test_a_prefix_ends_where_its_window_pages_are_gone() -> None:
    memory = window_memory(24, window=8)
    first = computed(memory, list(range(40)))
    branch = computed(memory, [*range(12), 60])  # reads the window pages of pages 1 and 2
    branch.finish(FinishReason.STOP)
    memory.release(branch)
    other = computed(memory, list(range(70, 90)))  # takes those that were read longer ago
    memory.check([first, other])
    request = Request(generate("x", [*range(25), 99], 1))
    assert memory.cached_tokens(request) == 12


@pytest.mark.parametrize(
    ("prompt", "answer", "fits"),
    [(8, 1, True), (8, 2, False), (1, 8, True), (1, 9, False), (9, 1, False)],
)
def test_last_token_needs_no_page(prompt: int, answer: int, fits: bool) -> None:
    """Two pages of four tokens: the KV cache never holds the last token of an answer."""
    memory = Memory(Capacity(2, 4, 1, 100), use_prefix_cache=True)
    assert memory.can_ever_fit(prompt, answer) is fits


def test_context_length_limits_prompt_and_answer() -> None:
    memory = Memory(Capacity(100, 4, 1, 10), use_prefix_cache=True)
    assert memory.can_ever_fit(9, 1) and not memory.can_ever_fit(9, 2)


def test_one_page_of_five_tokens_holds_five_and_the_answer_has_one_more() -> None:
    memory = Memory(Capacity(1, 5, 1, 100), use_prefix_cache=True)
    assert memory.can_ever_fit(5, 1) and not memory.can_ever_fit(5, 2)
