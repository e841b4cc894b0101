"""A rank of a group without communication. It is enough to load one rank's part of a model."""

from __future__ import annotations

from mla_router.worker.kernels.comm.group import Group


class Position(Group):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, processes=())
