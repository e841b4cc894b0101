"""DP ranks launch each step together, whatever their requests, and answer as if alone."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.dp_group import LocalMailbox, dp_groups
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.messages import Abort, FlushCache, Shutdown
from mla_router.worker.scheduler.drafts import NOTHING, DecodeOutcome
from mla_router.worker.scheduler.lockstep import Lockstep
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import GroupStep, StepPlan
from support.dp_schedulers import DpScheduler, dp_schedulers, wait_idle
from support.examples import examples
from support.fake_engine import continuation
from support.processes import wait_until
from support.scripted_scheduler import generate

CAPACITY = Capacity(num_pages=40, page_size=4, num_slots=3, context_length=100)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 2),  # DP rank
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 20),  # output tokens
        st.sampled_from([0.0, 0.0, 0.0, 0.002, 0.02]),  # seconds before the next one
        st.sampled_from(["", "", "", "abort", "flush"]),
    ),
    min_size=1,
    max_size=14,
)


@given(arrivals=ARRIVALS, size=st.integers(2, 3), overlap=st.booleans())
@examples(25, deadline=None)
def test_random_requests(
    arrivals: list[tuple[int, int, int, float, str]], size: int, overlap: bool
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        dp_schedulers(Path(folder), size, CAPACITY, overlap=overlap) as ranks,
    ):
        asked: list[tuple[DpScheduler, str, list[int], bool]] = []
        for number, (rank, length, max_tokens, pause, then) in enumerate(arrivals):
            one, rid = ranks[rank % size], f"r{number}"
            prompt = [(7 * i + number % 3) % 50 for i in range(length)]
            asked.append((one, rid, continuation(prompt, max_tokens), then == "abort"))
            one.say(generate(rid, prompt, max_tokens))
            time.sleep(pause)
            if then == "abort":
                one.say(Abort(rid))
            elif then == "flush":
                ranks[(rank + 1) % size].say(FlushCache(1, 0))
        for one, rid, expected, is_aborted in asked:
            wait_until(lambda one=one, rid=rid: one.has_ended(rid), rid)
            found = one.tokens(rid)
            assert found == expected[: len(found)]
            assert is_aborted or found == expected


def test_idle_ranks_sleep_and_wake_together(tmp_path: Path) -> None:
    with dp_schedulers(tmp_path, 3, CAPACITY) as ranks:
        wait_idle(ranks)
        assert not ranks[0].engine.groups
        before = [one.channel.receives for one in ranks]
        time.sleep(0.3)
        # A turn or two for heartbeats
        assert max(one.channel.receives - n for one, n in zip(ranks, before, strict=True)) <= 3
        ranks[1].say(generate("a", [1, 2, 3], 9))
        wait_until(lambda: ranks[1].has_ended("a"), "answered")
        assert ranks[1].tokens("a") == continuation([1, 2, 3], 9)
        wait_idle(ranks)
        rows = [group.rows for group in ranks[0].engine.groups]
        assert rows == [(0, 3, 0)] + 8 * [(0, 1, 0)]


def test_a_rank_that_stops_serves_the_others(tmp_path: Path) -> None:
    with dp_schedulers(tmp_path, 2, CAPACITY) as ranks:
        ranks[0].say(Shutdown())
        ranks[1].say(generate("a", [1, 2, 3], 50))
        wait_until(lambda: ranks[1].has_ended("a"), "answered")
        assert ranks[1].tokens("a") == continuation([1, 2, 3], 50)
        assert ranks[0].is_running


def test_a_step_that_fits_no_decode_graph_on_one_rank(tmp_path: Path) -> None:
    capacity = Capacity(num_pages=40, page_size=16, num_slots=3, context_length=200)
    with dp_schedulers(tmp_path, 2, capacity) as ranks:
        ranks[0].say(generate("a", [1] * 100, 2, prompt_logprobs_from=0))
        ranks[1].say(generate("b", [1], 60))
        wait_until(lambda: ranks[0].has_ended("a") and ranks[1].has_ended("b"), "answered")
        groups = ranks[0].engine.groups
        assert all(group.decode == (group.rows[0] <= 1) for group in groups), groups


def test_the_largest_value_of_all_ranks(tmp_path: Path) -> None:
    del tmp_path
    with dp_groups(3) as groups, ThreadPoolExecutor() as pool:
        boxes = [LocalMailbox(group, rank) for rank, group in enumerate(groups)]
        ranks = [Lockstep(box, Heartbeat.create()) for box in boxes]

        def values(rank: int) -> list[float]:
            return [ranks[rank].largest(value) for value in (rank, -rank, 5.0)]

        assert list(pool.map(values, range(3))) == [[2.0, 0.0, 5.0]] * 3
        for box in boxes:
            box.close()


def test_all_ranks_get_the_outcomes_of_all() -> None:
    shown = [DecodeOutcome(3, 7, 0.25, has_drafts=True), NOTHING]
    with dp_groups(2) as groups, ThreadPoolExecutor() as pool:
        boxes = [LocalMailbox(group, rank) for rank, group in enumerate(groups)]
        ranks = [Lockstep(box, Heartbeat.create()) for box in boxes]
        # Without a step no turn begins
        assert list(pool.map(lambda rank: rank.join(None), ranks)) == [None, None]
        assert [rank.outcomes for rank in ranks] == [(), ()]
        plan = Step(StepPlan((0,), (5,), (), (), ()), [], [])
        awaited = pool.submit(ranks[0].join, plan, shown[0])
        # A rank without a plan joins if another one waits for it.
        wait_until(lambda: ranks[1].is_awaited, "the size of rank 0")
        steps = [ranks[1].join(None, shown[1]), awaited.result()]
        assert all(
            step is not None and step.plan.group == GroupStep((1, 0), True) for step in steps
        )
        assert [rank.outcomes for rank in ranks] == [shown, shown]
        for box in boxes:
            box.close()
