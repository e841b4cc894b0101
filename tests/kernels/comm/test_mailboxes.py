"""Ranks share memory if all of their GPUs access each other's."""

from __future__ import annotations

from mla_router.worker.kernels.comm.mailboxes import Place, obstacle


def test_gpus_that_access_each_other() -> None:
    assert obstacle([Place("m", "a", ("b", "c")), Place("m", "b", ("a",))]) is None


def test_a_gpu_out_of_reach_is_named() -> None:
    places = [Place("m", "a", ("b",)), Place("m", "b", ("c",))]
    assert obstacle(places) == "the GPU of rank 1 cannot access the memory of the GPU of rank 0"


def test_one_gpu_for_two_ranks() -> None:
    assert obstacle([Place("m", "a", ("b",)), Place("m", "a", ("b",))]) is not None


def test_several_machines() -> None:
    places = [Place("m", "a", ("b",)), Place("n", "b", ("a",))]
    assert obstacle(places) == "the ranks are on several machines"
