"""Facts about this machine that settings depend on."""

from __future__ import annotations

from pathlib import Path


def default_server_processes(device: str, cores: int) -> int:
    """Returns the number of server processes for a worker with `cores` cores. One process cannot send tokens as fast as
    a GPU generates them."""
    return max(1, min(4, cores // 4)) if has_gpu(device) else 1


def has_gpu(device: str) -> bool:
    """Returns whether a worker with this --device runs on a GPU."""
    return device == "cuda" or (device == "auto" and any(Path("/dev").glob("nvidia[0-9]*")))
