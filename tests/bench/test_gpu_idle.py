"""gpu_idle with a trace whose gaps are known."""

from __future__ import annotations

from gpu_idle import idle


def event(start: float, length: float, name: str = "gemm", category: str = "kernel") -> dict:
    return {"ts": start, "dur": length, "name": name, "cat": category}


def test_gaps_between_and_within_steps() -> None:
    events = [
        event(100, 10),
        event(105, 10),  # beside the first, on another stream
        event(120, 5),  # 5 within
        event(125, 5, "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy"),
        event(150, 45),  # 20 between
        event(195, 5, "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy"),
        event(0, 1000, "forward", "cpu_op"),
    ]
    got = idle(events)
    assert got == {"steps": 1, "total_us": 100, "between_steps": 0.2, "within_steps": 0.05}
