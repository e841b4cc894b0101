"""kernel_shares with a trace whose times are known."""

from __future__ import annotations

from kernel_shares import LAST, shares


def event(start: float, length: float, name: str, category: str = "kernel") -> dict:
    return {"ts": start, "dur": length, "name": name, "cat": category}


def test_time_of_each_kernel() -> None:
    events = [
        event(100, 10, "a"),
        event(105, 15, "b"),  # waited for `a`: 10
        event(112, 6, "c"),  # beside `b`: ends before it
        event(130, 10, "a"),  # 10 idle
        event(140, 5, LAST),
        event(150, 20, "a"),  # 5 idle
        event(170, 5, LAST),
        event(0, 1000, "forward", "cpu_op"),
    ]
    got = shares(events)
    assert (got["steps"], got["step_us"], got["idle_us"]) == (2, 37.5, 7.5)
    kernels = {kernel["name"]: (kernel["launches"], kernel["us"]) for kernel in got["kernels"]}
    assert kernels["a"] == (1.5, 20) and next(iter(kernels)) == "a"
    assert kernels["b"][1] + kernels["c"][1] == 5
    assert sum(us for _, us in kernels.values()) + got["idle_us"] == got["step_us"]
