"""DP ranks, which share the experts of one model, give the results of separate engines.

The steps of a scheduler for each DP rank are launched together, between idle steps, by processes over gloo: prompts in
chunks, with cached prefixes, decode rows and both together, with random sampling and logprobs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mla_router.worker.tree_shape import TreeShape
from support import dp_engine
from support.dp_engine import Case, Division, Outcome, together
from support.ranks import ranks
from support.served_steps import CAPACITY, assert_same, numbers, served
from support.tiny_model import CONFIGS, write_tiny_model
from support.tiny_mtp import write_tiny_mtp


def compare(folder: Path, division: Division, case: Case, seed: int, count: int) -> list[Outcome]:
    """Asserts that each DP rank has the results of an engine for itself. Returns what each rank has seen."""
    alone = [
        served(folder, seed=seed + i, count=count, capacity=case.capacity)
        for i in range(division.dp_size)
    ]
    steps = together([engine.steps for engine in alone], seed)
    processes = ranks(division.size)
    assert any(numbers(engine.results()) for engine in alone)
    seen = processes.call(dp_engine.repeat, processes.folder, division, case, steps)
    each = division.size // division.dp_size
    for rank, outcome in enumerate(seen):
        assert_same(outcome.results, alone[rank // each].results())
        # Bit by bit on the ranks of one DP rank
        assert numbers(outcome.results) == numbers(seen[rank // each * each].results)
        assert outcome.routed_idle_rows == 0
    return seen


@pytest.mark.parametrize(
    ("name", "division"),
    [
        ("v3", Division(2, 2)),
        pytest.param("v2_lite", Division(2, 2, expert_parts=2), marks=pytest.mark.slow),
        pytest.param("v3", Division(4, 2, expert_parts=4), marks=pytest.mark.slow),
        ("v3_halves", Division(4, 2, expert_parts=2)),
        ("v2_lite", Division(4, 4)),
        ("v3", Division(2, 2, expert_parts=2, all_to_all=True)),
        pytest.param("v3", Division(4, 2, expert_parts=4, all_to_all=True), marks=pytest.mark.slow),
        ("v3_halves", Division(4, 4, expert_parts=2, all_to_all=True)),
    ],
    ids=str,
)
def test_each_dp_rank_has_the_results_of_an_engine_alone(
    tmp_path: Path, name: str, division: Division
) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    compare(tmp_path, division, Case(tmp_path, CAPACITY), seed=3, count=5)


@pytest.mark.parametrize(
    "division",
    [
        Division(2, 2, expert_parts=2),
        pytest.param(Division(4, 2), marks=pytest.mark.slow),
        Division(4, 4, expert_parts=4, all_to_all=True),
    ],
    ids=str,
)
def test_graphs_with_idle_rows(tmp_path: Path, division: Division) -> None:
    """All ranks run the graph of the one with most rows. Experts compute no padding."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    case = Case(tmp_path, CAPACITY, decode_sizes=(2, 4, 8, 16), piecewise_sizes=(8, 24, 40))
    seen = compare(tmp_path, division, case, seed=7, count=6)
    assert all(outcome.idle_rows and outcome.piecewise_steps for outcome in seen)


@pytest.mark.parametrize(
    ("drafts", "division", "graphs"),
    [
        (1, Division(2, 2), False),
        pytest.param(3, Division(2, 2, expert_parts=2), True, marks=pytest.mark.slow),
        (2, Division(2, 2, expert_parts=2, all_to_all=True), True),
        pytest.param(1, Division(2, 2), True, marks=pytest.mark.slow),
        pytest.param(2, Division(4, 2, expert_parts=4), False, marks=pytest.mark.slow),
        pytest.param(2, Division(4, 2, expert_parts=4), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_of_the_own_layer(
    tmp_path: Path, drafts: int, division: Division, graphs: bool
) -> None:
    """Its experts take the rows of all DP ranks, whether they have drafts or not."""
    write_tiny_mtp(tmp_path, 1, **CONFIGS["v3"])
    capacity = replace(CAPACITY, tokens_per_row=1 + drafts)
    case = Case(tmp_path, capacity)
    if graphs:
        verify = [size * (1 + drafts) for size in (1, 2, 4, 8)]
        case = Case(tmp_path, capacity, sorted({2, 4, 8, 16, *verify}), verify, (24, 40))
    seen = compare(tmp_path, division, case, seed=5, count=5)
    assert any(len(some) > 1 for outcome in seen for r in outcome.results for some in r.tokens)


@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_trees_of_the_own_layer(tmp_path: Path, graphs: bool) -> None:
    """The experts take all nodes that are expanded, of the ranks that expand some."""
    write_tiny_mtp(tmp_path, 1, **CONFIGS["v3"])
    shape = TreeShape(3, 3, 8, CAPACITY.num_slots)
    capacity = replace(CAPACITY, tokens_per_row=4, tree=shape)
    case = Case(tmp_path, capacity)
    if graphs:
        verify = [size * shape.nodes for size in (1, 2, 4, 8)]
        case = Case(tmp_path, capacity, sorted({2, 4, *verify}), verify, (24, 40))
    seen = compare(tmp_path, Division(2, 2, expert_parts=2), case, seed=5, count=5)
    assert any(len(some) > 1 for outcome in seen for r in outcome.results for some in r.tokens)


def test_the_first_steps_of_engines_need_no_agreement(tmp_path: Path) -> None:
    """All DP ranks run the same steps then."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    alone = served(tmp_path, count=4)
    processes, case = ranks(2), Case(tmp_path, CAPACITY, decode_sizes=(4,))
    for outcome in processes.call(
        dp_engine.repeat, processes.folder, Division(2, 2), case, [alone.steps] * 2
    ):
        assert_same(outcome.results, alone.results())


@pytest.mark.slow
@pytest.mark.parametrize(
    "division",
    [
        Division(2, 2),
        Division(2, 2, 2),
        Division(4, 2, 2),
        Division(4, 4, 4),
        Division(4, 4, 4, all_to_all=True),
        Division(4, 2, 2, all_to_all=True),
    ],
    ids=str,
)
def test_random_steps(tmp_path: Path, division: Division) -> None:
    for seed, name in enumerate(("v3", "v2_lite", "v2_grouped", "v3_halves") * 2, 100):
        folder = tmp_path / str(seed)
        write_tiny_model(folder, seed=seed, **CONFIGS[name])
        graphs = ((), ()), ((1, 2, 3, 4, 6, 8, 12, 16, 24), (16, 24, 32))
        compare(folder, division, Case(folder, CAPACITY, *graphs[seed % 2]), seed=seed, count=16)
