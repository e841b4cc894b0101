"""The processes of several ranks, joined to a group: on a CPU over gloo, or on a GPU each over NCCL. Or each has the mailboxes
of `kernels/comm/one_shot.py` or the row boxes of `one_shot_all_to_all.py` instead of a group, on a GPU each or all on one.

They are forks of one process that has imported torch. Functions that they run must be importable: those of support modules.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from mla_router.worker.kernels.comm.connect import Meeting
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.comm.mailboxes import map_mailboxes, map_row_boxes
from mla_router.worker.kernels.comm.one_shot import Mailboxes
from mla_router.worker.kernels.comm.one_shot_all_to_all import RowBoxes
from support.processes import EVENT_TIMEOUT_S


class Ranks:
    """`size` processes, which call functions until `close`. `device_type`: "cpu", "cuda", or "mailboxes" or
    "row boxes" " on GPUs" or " on one GPU"."""

    def __init__(self, size: int, device_type: str = "cpu") -> None:
        self.is_closed = False
        self._folder = tempfile.TemporaryDirectory(prefix="mla-test-ranks-")
        self.folder = Path(self._folder.name)
        store = self.folder / "store"
        pipes = [multiprocessing.Pipe() for _ in range(size)]
        self._pipes = [own for own, _ in pipes]
        self._processes = [
            _context().Process(
                target=_serve, args=(rank, size, store, device_type, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns the results of function(group, *arguments), by rank. If a rank raises, all end, and this raises
        AssertionError with the traceback."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        try:
            return [self._answer(rank) for rank in range(len(self._pipes))]
        except AssertionError:
            self.close()
            raise

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        assert pipe.poll(EVENT_TIMEOUT_S), f"rank {rank} does not answer"
        try:
            result, error = pipe.recv()
        except EOFError:
            raise AssertionError(f"rank {rank} has ended") from None
        assert error is None, f"rank {rank}: {error}"
        return result

    def close(self) -> None:
        self.is_closed = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


_open: dict[int, Ranks] = {}


def ranks(size: int) -> Ranks:
    """Returns the same processes in all tests of a run."""
    if size not in _open or _open[size].is_closed:
        _open[size] = Ranks(size)
        atexit.register(_open[size].close)
    return _open[size]


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Of the package: Python 3.11 does not give a fork server this process's import path, and ignores what it cannot import
    context.set_forkserver_preload(
        ["mla_router.worker.engine.loader", "mla_router.worker.kernels.comm.group"]
    )
    return context


def _serve(rank: int, size: int, store: Path, device_type: str, calls: Connection) -> None:
    gc.freeze()  # collections skip what the fork server has imported
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device("cuda", 0 if device_type.endswith("on one GPU") else rank)
        torch.cuda.set_device(device)
    file = FileStore(str(store), -1)
    group: Group | Mailboxes | RowBoxes
    if device_type in ("cpu", "cuda"):
        group = Group.join(rank, size, Meeting(file, device, timeout_s=2 * EVENT_TIMEOUT_S))
    else:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        # Binding memory to a multicast object waits for as many devices as there are ranks
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        share = map_mailboxes if device_type.startswith("mailboxes") else map_row_boxes
        group = share(rank, size, file, device)
    with contextlib.suppress(EOFError, OSError):  # the end of the test
        while True:
            function, arguments = calls.recv()
            try:
                calls.send((function(group, *arguments), None))
            except Exception:  # noqa: BLE001 (the caller raises it)
                calls.send((None, traceback.format_exc()))
                return  # so that no other rank waits for this one
