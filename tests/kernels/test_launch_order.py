"""The check of captured graphs finds faults. Real graphs are checked in `tests/gpu/test_launch_order_cuda.py`."""

from __future__ import annotations

import pytest

from support.captured_graph import Edge, Graph, unsettled

NAMES = ["schedule_kernel", "_Z10look_up", "_Z9embedding", "rms_norm", "merge_kernel"]
STEP = "WDDPP"  # the edge to each kernel from the one before: default or programmatic; the first has none


def chain(names: list[str], kinds: str) -> Graph:
    edges = [Edge(node - 1, node, kinds[node] == "P") for node in range(1, len(names))]
    return Graph(names, edges)


def test_a_step_is_settled() -> None:
    graph = chain(NAMES, STEP)
    assert graph.before(4, by_programmatic_edges=True) == {2, 3}
    assert graph.before(4) == {0, 1, 2, 3}
    assert unsettled(graph, ["merge_kernel"], ["schedule_kernel"]) == []


@pytest.mark.parametrize(
    ("names", "kinds", "broken"),
    [
        # The embedding is launched early, and so is the look-up before it
        (NAMES, "WPPPP", "schedule_kernel beside merge_kernel"),
        # An embedding of ours, launched early: the look-up before it may not have ended
        (
            [*NAMES[:2], "embedding", *NAMES[3:]],
            "WDPPP",
            "_Z10look_up before merge_kernel, ahead of all of torch's",
        ),
        # The schedule is made after the embedding
        (
            ["_Z10look_up", "_Z9embedding", "schedule_kernel", *NAMES[3:]],
            "WDPPP",
            "schedule_kernel beside",
        ),
        # No kernel of torch
        (
            ["schedule_kernel", "embedding", "merge_kernel"],
            "WDP",
            "embedding before merge_kernel, ahead of all of torch's",
        ),
    ],
)
def test_breaches_are_named(names: list[str], kinds: str, broken: str) -> None:
    found = unsettled(chain(names, kinds), ["merge_kernel"], ["schedule_kernel"])
    assert any(text.startswith(broken) for text in found), found
