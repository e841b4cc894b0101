"""The choice of a step's runner and its number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_router.worker.engine.runners.choose import (
    MAX_EXTRA_READS,
    MAX_INPUT_TOKENS,
    MAX_PADDING,
    RunnerChoice,
    RunnerKind,
    choose_runner,
    fits_decode_graph,
)
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.step.plan import GroupStep, ImageRows, PrefillChunk, StepPlan

EAGER, DECODE = RunnerKind.EAGER, RunnerKind.DECODE_GRAPH
PREFILL, PIECEWISE = RunnerKind.PREFILL_GRAPH, RunnerKind.PIECEWISE


def chunk(slot: int, start: int, length: int, is_last: bool = True) -> PrefillChunk:
    return PrefillChunk(slot, start, tuple(range(100, 100 + length)), is_last)


def step(*chunks: PrefillChunk, decodes: int = 0) -> StepPlan:
    slots = tuple(range(decodes))
    return StepPlan(slots, tuple(5 + slot for slot in slots), chunks, (), ())


def test_slots_with_drafts_have_graphs_of_their_own() -> None:
    """Their rows are adjacent and equally many, unless there are rows of prompts as well."""
    sizes = GraphSizes(decode=[4, 16, 32], verify=[8, 16])
    verify = replace(step(decodes=3), num_drafts=3)
    assert verify.num_tokens == 12
    assert choose_runner(verify, sizes) == (RunnerKind.VERIFY_GRAPH, 16)
    assert choose_runner(replace(verify, num_drafts=0), sizes) == (DECODE, 4)
    beside = replace(step(chunk(5, 0, 3), decodes=3), num_drafts=3)
    assert choose_runner(beside, sizes) == (DECODE, 16)
    more = replace(step(decodes=5), num_drafts=3)
    assert choose_runner(more, sizes) == (DECODE, 32)


def test_images_need_a_graph_that_is_cut_behind_the_embedding() -> None:
    """The only such graphs are piecewise."""
    sizes = GraphSizes(decode=(4, 16), prefill=(16, 32), piecewise=(16, 32))
    text = chunk(5, 0, 9)
    image = replace(text, images=(ImageRows(row=2, count=4, key=7, start=0),))
    assert choose_runner(step(text, decodes=2), sizes) == (DECODE, 16)
    assert choose_runner(step(image, decodes=2), sizes) == (PIECEWISE, 16)
    long = chunk(5, 0, 30), replace(chunk(5, 0, 30), images=image.images)
    assert [choose_runner(step(c), replace(sizes, decode=())).kind for c in long] == [
        PREFILL,
        PIECEWISE,
    ]
    assert choose_runner(step(image), GraphSizes(prefill=(16,))) == (EAGER, 9)


def test_steps_with_few_prompt_tokens_fit_a_decode_graph() -> None:
    assert fits_decode_graph(step(decodes=1000))
    assert fits_decode_graph(step(chunk(5, 0, 3)))
    assert fits_decode_graph(step(chunk(5, 7, 2), chunk(4, 0, 9, is_last=False), decodes=4))
    assert fits_decode_graph(step())  # an idle DP rank
    halves = chunk(5, 0, MAX_INPUT_TOKENS // 2), chunk(4, 0, MAX_INPUT_TOKENS // 2)
    assert fits_decode_graph(step(*halves, decodes=3))
    assert not fits_decode_graph(step(*halves, chunk(3, 0, 1), decodes=3))
    scored = PrefillChunk(5, 0, (1, 2, 3), is_last=True, logprob_start=1, logprob_tokens=(2,))
    assert not fits_decode_graph(step(scored, decodes=3))


def test_reads_of_a_decode_graph_are_bounded() -> None:
    """A chunk of n tokens that ends at position e reads n * e rows as decode rows, and e rows otherwise."""
    end = MAX_EXTRA_READS // 8
    assert fits_decode_graph(step(chunk(5, 10 * MAX_EXTRA_READS, 1), decodes=2))
    assert fits_decode_graph(step(chunk(5, end - 9, 9), decodes=2))
    assert not fits_decode_graph(step(chunk(5, end - 8, 9)))
    assert not fits_decode_graph(step(chunk(5, end - 9, 9), chunk(4, 0, 2)))


def test_the_smallest_graph_that_fits_is_selected() -> None:
    sizes = GraphSizes(decode=(2, 4, 8))
    taken = [choose_runner(step(decodes=n), sizes) for n in range(1, 10)]
    assert taken == [(DECODE, size) for size in (2, 2, 4, 4, 8, 8, 8, 8)] + [(EAGER, 9)]


SCORED = PrefillChunk(5, 0, (1, 2, 3), is_last=True, logprob_tokens=(2,))
SIZES = GraphSizes(decode=(4, 8), piecewise=(16, 32), prefill=(16, 24))


@pytest.mark.parametrize(
    ("plan", "choice"),
    [
        (step(chunk(9, 0, 3), decodes=2), (DECODE, 8)),
        (step(chunk(9, 0, 3), chunk(7, 5, 2, is_last=False), decodes=1), (DECODE, 8)),
        (step(chunk(9, 0, 3)), (DECODE, 4)),  # before a prefill graph
        (step(chunk(9, 0, 9)), (PREFILL, 16)),
        (step(chunk(9, 0, 17, is_last=False)), (PREFILL, 24)),  # first chunk of a longer prompt
        (step(SCORED), (PREFILL, 16)),
        (step(SCORED, decodes=1), (PIECEWISE, 16)),
        (step(chunk(9, 4, 9)), (PIECEWISE, 16)),
        (step(chunk(9, 0, 9), decodes=1), (PIECEWISE, 16)),
        (step(chunk(9, 0, 9), chunk(8, 0, 9)), (PIECEWISE, 32)),
        (step(chunk(9, 0, 25)), (PIECEWISE, 32)),
        (step(decodes=9), (PIECEWISE, 16)),
        (step(chunk(9, 0, 33)), (EAGER, 33)),
    ],
)
def test_the_first_runner_that_fits_is_selected(
    plan: StepPlan, choice: tuple[RunnerKind, int]
) -> None:
    assert choose_runner(plan, SIZES) == RunnerChoice(*choice)
    assert choose_runner(plan, GraphSizes()) == (EAGER, plan.num_tokens)


def test_idle_steps_without_a_group_have_no_graph() -> None:
    assert choose_runner(step(), GraphSizes(decode=(4, 8))) == (EAGER, 0)


@pytest.mark.parametrize(
    ("plans", "choice"),
    [
        ((step(decodes=2), step(decodes=7), step()), (DECODE, 8)),
        ((step(chunk(9, 0, 3)), step(decodes=4)), (DECODE, 4)),
        ((step(decodes=2), step(chunk(9, 0, 9))), (PIECEWISE, 16)),  # no prefill graph
        ((step(SCORED), step()), (PIECEWISE, 16)),
        ((step(chunk(9, 0, 20)), step(chunk(9, 0, 7), decodes=1)), (PIECEWISE, 32)),
    ],
)
def test_all_ranks_of_a_group_choose_the_same_graph(
    plans: tuple[StepPlan, ...], choice: tuple[RunnerKind, int]
) -> None:
    rows = tuple(plan.num_tokens for plan in plans)
    group = GroupStep(rows, all(map(fits_decode_graph, plans)))
    for plan in plans:
        assert choose_runner(replace(plan, group=group), SIZES) == RunnerChoice(*choice)


def test_a_long_prompt_on_one_rank_is_eager_on_all() -> None:
    group = GroupStep((33, 2, 0), decode=False)
    plans = step(chunk(9, 0, 33)), step(decodes=2), step()
    choices = [choose_runner(replace(plan, group=group), SIZES) for plan in plans]
    assert choices == [(EAGER, 33), (EAGER, 2), (EAGER, 0)]


def test_dp_ranks_exchange_little_padding() -> None:
    sizes = GraphSizes(piecewise=(MAX_PADDING,))
    for others, kind in (((MAX_PADDING, 0), PIECEWISE), ((MAX_PADDING - 1, 0), EAGER)):
        for rows in ((MAX_PADDING, *others), (*others[::-1], MAX_PADDING)):
            plan = replace(step(chunk(9, 0, rows[0])), group=GroupStep(rows, decode=False))
            assert choose_runner(plan, sizes).kind is kind
    alone = step(chunk(9, 4, 1))
    assert choose_runner(alone, sizes) == (PIECEWISE, MAX_PADDING)
